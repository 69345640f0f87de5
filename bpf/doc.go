// SPDX-License-Identifier: Apache-2.0

// Package bpf is the datapath in the kernel and its typed interface: which new connections are
// admitted, and how many connections every backend has.
//
// It is not a policy: it knows neither drains nor services, only backends by number, their rules and
// their counts. Nothing in it touches an established connection.
//
//	host, err := bpf.Install(bpf.Options{})           // or Open, to use what is installed
//	defer host.Close()                                // the programs stay
//	tgid, start, err := bpf.Self()
//	err = host.WatchProcess(tgid, start, bpf.Watch{Backend: 7, Gen: 1, NotSelf: true})
//	ns, err := host.AttachNetNS(fd)                   // admission works in this namespace
//	err = host.Admit(bpf.Address{NetNS: ns.ID, AddrPort: listener}, false, 7)
//	err = host.SetBackend(7, bpf.BackendRule{Action: bpf.ActionRefuse, Enforce: true,
//		Gen: 1, Until: bpf.BootNow() + time.Minute}) // the flip
//	counts, err := host.Counts(7)
//	err = host.RemoveBackend(7)
//
// An owner of many backends opens one Ring for all of them, and reads AllCounts. A service address is a backend
// without listeners: open, with the targets that Place arranges.
//
// What is installed is shared by all processes of a host and outlives them: programs and maps are
// pinned in a directory of the BPF file system. Each backend has one owner, who writes its rule.
// Installations of different layouts work side by side; TakeOver moves a backend between them.
package bpf
