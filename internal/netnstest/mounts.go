// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"fmt"
	"os"
	"strings"
)

// mount is what a test needs of one line of /proc/self/mountinfo, see proc(5).
type mount struct {
	root   string // the directory of the file system that is mounted
	point  string // where
	fstype string
}

func readMounts() ([]mount, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	return parseMounts(string(text))
}

func parseMounts(text string) ([]mount, error) {
	// The kernel writes white space and backslashes in paths as three octal digits.
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var mounts []mount
	for line := range strings.Lines(text) {
		// The number of optional fields before the dash varies.
		left, right, ok := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 6 || len(r) < 2 {
			return nil, fmt.Errorf("parse mounts: unexpected line %q", line)
		}
		mounts = append(mounts, mount{root: unescape.Replace(l[3]), point: unescape.Replace(l[4]), fstype: r[0]})
	}
	return mounts, nil
}
