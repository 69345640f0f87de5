// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ebbproxy/ebb/internal/netnstest"
)

func bpfCall(cmd int, attr []byte) (int, error) {
	r, _, e := unix.Syscall(unix.SYS_BPF, uintptr(cmd), uintptr(unsafe.Pointer(&attr[0])), uintptr(len(attr)))
	if e != 0 {
		return -1, fmt.Errorf("bpf command %d: %w", cmd, e)
	}
	return int(r), nil
}

// tagMap is a socket storage map with a value of 8 bytes, made by hand: nothing here loads BPF otherwise.
func tagMap(t *testing.T) int {
	t.Helper()
	u32s := func(v ...uint32) (b []byte) {
		for _, x := range v {
			b = binary.NativeEndian.AppendUint32(b, x)
		}
		return b
	}
	const kindInt = 1 << 24
	types := u32s(1, kindInt, 4, 32, 5, kindInt, 8, 64) // name, info, size, bits: the types 1 and 2
	names := []byte("\x00u32\x00u64\x00")
	btf := append(u32s(0x0001eb9f, 24, 0, uint32(len(types)), uint32(len(types)), uint32(len(names))), types...)
	if !nativeLittle {
		t.Skip("the BTF header above is that of a little-endian machine")
	}
	btf = append(btf, names...)
	attr := make([]byte, 32)
	binary.NativeEndian.PutUint64(attr, uint64(uintptr(unsafe.Pointer(&btf[0]))))
	binary.NativeEndian.PutUint32(attr[16:], uint32(len(btf)))
	b, err := bpfCall(unix.BPF_BTF_LOAD, attr)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(b)
	attr = make([]byte, 64)
	copy(attr, u32s(unix.BPF_MAP_TYPE_SK_STORAGE, 4, 8, 0, unix.BPF_F_NO_PREALLOC))
	copy(attr[48:], u32s(uint32(b), 1, 2)) // btf_fd, key and value type
	m, err := bpfCall(unix.BPF_MAP_CREATE, attr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(m) })
	return m
}

func TestDumpReturnsTags(t *testing.T) {
	netnstest.LeakCheck(t)
	ns := netnstest.New(t)
	m := tagMap(t)
	d, err := OpenDiag(DiagOptions{NetNS: ns.Fd(), TagMapFD: m})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	tagged, plain := ns.Listen(t, "tcp", "[::]:0"), ns.Listen(t, "tcp", "127.0.0.1:0")
	want := []byte{1, 2, 3, 4, 5, 6, 7, 8}
	control(t, tagged, func(fd int) {
		key := binary.NativeEndian.AppendUint32(nil, uint32(fd))
		attr := make([]byte, 32)
		binary.NativeEndian.PutUint32(attr, uint32(m))
		binary.NativeEndian.PutUint64(attr[8:], uint64(uintptr(unsafe.Pointer(&key[0]))))
		binary.NativeEndian.PutUint64(attr[16:], uint64(uintptr(unsafe.Pointer(&want[0]))))
		if _, err := bpfCall(unix.BPF_MAP_UPDATE_ELEM, attr); err != nil {
			t.Fatal(err)
		}
	})
	for _, tags := range []bool{true, false} {
		socks, err := d.Dump(t.Context(), Filter{States: 1 << StateListen, Tags: tags})
		if err != nil || len(socks) != 2 {
			t.Fatalf("got %d sockets, %v, want 2", len(socks), err)
		}
		for _, s := range socks {
			switch s.Local.Port() {
			case port(t, tagged.Addr()):
				if tags != slices.Equal(s.Tag, want) {
					t.Errorf("asked for tags %v: got tag %x of the tagged one", tags, s.Tag)
				}
			case port(t, plain.Addr()):
				if s.Tag != nil {
					t.Errorf("asked for tags %v: got tag %x of the plain one", tags, s.Tag)
				}
			}
		}
	}
}
