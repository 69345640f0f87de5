// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRecord(t *testing.T) {
	r, err := self()
	if err != nil {
		t.Fatal(err)
	}
	if r.pid != os.Getpid() || r.start == 0 || r.pidns == 0 || len(r.boot) != 36 {
		t.Errorf("got %+v, want this process", r)
	}
	longest := record{pid: math.MaxInt32, start: math.MaxUint64, pidns: math.MaxUint64, boot: r.boot, renewed: math.MaxUint64}
	for _, r := range []record{r, longest} {
		b := r.encode()
		if len(b) != recordSize || b[recordSize-1] != '\n' {
			t.Errorf("got %d bytes, want one line of %d", len(b), recordSize)
		}
		if got, err := decode(b); err != nil || got != r {
			t.Errorf("got %+v, %v, want %+v", got, err, r)
		}
	}
}

// What is not a whole record is none: nobody is killed for it.
func TestTornRecord(t *testing.T) {
	old := record{pid: 1000, start: 5, pidns: 6, boot: "b0", renewed: 1 << 40}
	new := record{pid: 77, start: 8, pidns: 6, boot: "b1", renewed: 1 << 41}
	a, b := old.encode(), new.encode()
	for cut := 1; cut < recordSize; cut++ {
		torn := append(append([]byte(nil), b[:cut]...), a[cut:]...)
		if bytes.Equal(torn, a) || bytes.Equal(torn, b) {
			continue
		}
		if got, err := decode(torn); !errors.Is(err, errRecord) {
			t.Errorf("torn at %d: got %+v, %v, want errRecord", cut, got, err)
		}
		if got, err := decode(b[:cut]); !errors.Is(err, errRecord) && got != new {
			t.Errorf("%d bytes: got %+v, %v, want errRecord", cut, got, err)
		}
	}
	path := filepath.Join(t.TempDir(), "lease")
	for _, text := range []string{"", string(blank), "garbage", strings.Repeat("x", 9999), "ebb-lease v1 pid=1 crc=00000000"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := readPath(path); !errors.Is(err, errRecord) {
			t.Errorf("%.20q: got %+v, %v, want errRecord", text, got, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(record{pid: 1000, start: 5, pidns: 6, boot: "b0", renewed: 7}.encode())
	f.Add(blank)
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decode(b)
		if err != nil {
			if !errors.Is(err, errRecord) || r != (record{}) {
				t.Errorf("got %+v, %v, want nothing with errRecord", r, err)
			}
			return
		}
		if again, err := decode(r.encode()); err != nil || again != r || r.pid <= 0 {
			t.Errorf("got %+v, %v from %+v", again, err, r)
		}
	})
}
