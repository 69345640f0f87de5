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

// SetQueueTimeout sets how long a request waits for a place.
func SetQueueTimeout(s *Server, d time.Duration) { s.patience = d }
