// SPDX-License-Identifier: Apache-2.0

// Package health asks a backend whether it is ready, again and again.
package health
