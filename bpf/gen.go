// SPDX-License-Identifier: Apache-2.0

package bpf

// The objects are the same for every little-endian architecture: no program reads a register set and
// none includes a kernel header.
//
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel -cflags "-O2 -g -Wall -Werror -mcpu=v3" admission admission.bpf.c
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel -cflags "-O2 -g -Wall -Werror -mcpu=v3" -type address -type admission -type backend -type alive -type tag -type count -type watch_key -type watch_rule -type drain -type event census census.bpf.c
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel -cflags "-O2 -g -Wall -Werror -mcpu=v3" -type file_record -type task_record -type port_key -type walk_order -type walk_result -type count_correction files files.bpf.c
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel -cflags "-O2 -g -Wall -Werror -mcpu=v3" -type early_rule early early.bpf.c
