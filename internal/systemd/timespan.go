// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// maxSpan stands for infinity: a service with it is waited for without end.
const maxSpan = time.Duration(math.MaxInt64)

// units of a time span, systemd.time(7).
var units = map[string]time.Duration{
	"": time.Second, "s": time.Second, "sec": time.Second, "second": time.Second, "seconds": time.Second,
	"us": time.Microsecond, "usec": time.Microsecond, "µs": time.Microsecond, "μs": time.Microsecond,
	"ms": time.Millisecond, "msec": time.Millisecond,
	"m": time.Minute, "min": time.Minute, "minute": time.Minute, "minutes": time.Minute,
	"h": time.Hour, "hr": time.Hour, "hour": time.Hour, "hours": time.Hour,
	"d": day, "day": day, "days": day, "w": 7 * day, "week": 7 * day, "weeks": 7 * day,
	"M": month, "month": month, "months": month, "y": year, "year": year, "years": year,
}

// As systemd.time(7) has them.
const (
	day   = 24 * time.Hour
	month = 2629800 * time.Second // 30.44 days
	year  = 31557600 * time.Second
)

// parseSpan reads a time span such as "5", "1min 30s" or "infinity". A number without a unit is seconds.
func parseSpan(s string) (time.Duration, error) {
	rest := strings.TrimSpace(s)
	if rest == "infinity" {
		return maxSpan, nil
	}
	if rest == "" {
		return 0, fmt.Errorf("time span %q is empty", s)
	}
	var sum float64
	for rest != "" {
		n := strings.IndexFunc(rest, func(r rune) bool { return r != '.' && (r < '0' || r > '9') })
		if n < 0 {
			n = len(rest)
		}
		v, err := strconv.ParseFloat(rest[:n], 64)
		if err != nil {
			return 0, fmt.Errorf("time span %q: want numbers with units, such as 1min 30s", s)
		}
		rest = strings.TrimLeft(rest[n:], " \t")
		if n = strings.IndexAny(rest, " \t.0123456789"); n < 0 {
			n = len(rest)
		}
		unit, ok := units[rest[:n]]
		if !ok {
			return 0, fmt.Errorf("time span %q: %q is not a unit of time", s, rest[:n])
		}
		rest = strings.TrimLeft(rest[n:], " \t")
		sum += v * float64(unit)
	}
	if sum >= float64(maxSpan) {
		return maxSpan, nil
	}
	return time.Duration(sum), nil
}

// formatSpan writes whole seconds, rounded up.
func formatSpan(d time.Duration) string {
	if d == maxSpan {
		return "infinity"
	}
	s := d / time.Second
	if d%time.Second > 0 {
		s++
	}
	return strconv.FormatInt(int64(s), 10) + "s"
}
