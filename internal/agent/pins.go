// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/bpf"
)

// checkPins tells what stands in the way of an installation in the pin directory: that it cannot be written, or another
// version's pins. Where nothing does it has nothing to say.
func checkPins(o bpf.Options) []Feature {
	dir := o.Dir
	if dir == "" {
		dir = bpf.DefaultDir
	}
	var out []Feature
	at := dir
	for at != filepath.Dir(at) {
		if _, err := os.Lstat(at); err == nil {
			break
		}
		at = filepath.Dir(at) // it would be made
	}
	if err := unix.Access(at, unix.W_OK|unix.X_OK); err != nil {
		out = append(out, Feature{
			Name: "pin directory", State: FeatureMissing, Detail: fmt.Sprintf("%s: %v", at, err),
			Hint: "mount the BPF file system so that it can be written (mount -o remount,rw), run as root, or choose another directory with --bpffs",
		})
	}
	h, err := bpf.Open(o)
	switch {
	case err == nil:
		if err := h.Close(); err != nil {
			out = append(out, Feature{Name: "installation", State: FeatureDegraded, Detail: err.Error(), Hint: "`ebb cleanup` removes it"})
		}
	case errors.Is(err, bpf.ErrLayout):
		// The error says what to do.
		out = append(out, Feature{Name: "installation", State: FeatureMissing, Detail: err.Error(), Hint: "until then a run counts by sock_diag and cannot close admission"})
	}
	return out
}
