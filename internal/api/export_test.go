// SPDX-License-Identifier: Apache-2.0

package api

import "time"

// RouteNames are the routes as "METHOD /path".
func RouteNames() []string {
	out := make([]string, len(routes))
	for i, r := range routes {
		out[i] = r.method + " " + r.path
	}
	return out
}

// SetSlowest sets how long the reader of a session's stream may take for an event.
func SetSlowest(s *Server, d time.Duration) { s.slowest = d }

// SetQueueTimeout sets how long a request waits for a place.
func SetQueueTimeout(s *Server, d time.Duration) { s.patience = d }
