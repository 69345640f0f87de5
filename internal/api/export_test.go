// SPDX-License-Identifier: Apache-2.0

package api

// RouteNames are the routes as "METHOD /path".
func RouteNames() []string {
	out := make([]string, len(routes))
	for i, r := range routes {
		out[i] = r.method + " " + r.path
	}
	return out
}
