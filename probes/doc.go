// SPDX-License-Identifier: Apache-2.0

// Package probes observes an application from outside: its processes and listeners, the connections of a
// network namespace, which of these are busy, and whether it is ready. It also holds the few gentle
// touches: to retire an idle connection, and to see a survivor of a drain to its end.
//
// It reads procfs and asks the kernel through sock_diag(7) and pidfd_getfd(2). It is not a datapath, decides
// nothing about a drain and loads no BPF: what a BPF reader sees of a connection comes in as a [Sample].
// Nothing here walks sockets unless it is called, and a call is one walk of each address family.
//
//	d, err := probes.OpenDiag(probes.DiagOptions{})
//	tree, err := probes.Tree(pid)
//	listeners, err := probes.Listeners(d, []int{tree[0].PID})
//	c := probes.NewClassifier(probes.ClassifierOptions{Protocol: "http1"})
//	for _, v := range c.Look(time.Now(), samples, true) {
//		if probes.Retirable(v, probes.RetireGuard{}) {
//			err = probes.Retire(ctx, v)
//		}
//	}
package probes
