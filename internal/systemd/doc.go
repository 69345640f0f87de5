// SPDX-License-Identifier: Apache-2.0

// Package systemd is what Ebb has to do with systemd: the notices of a service to its manager, and the drop-in that
// makes a unit drain before it stops.
//
// The drop-in is derived from the unit's own files, since a list such as ExecStop= can be replaced there but nothing
// can be put in front of it. It is written below /etc/systemd/system of this machine or of an image, carries a checksum
// of itself, and is replaced or removed only while that is right: what a person has changed stays.
//
// The package does not start, stop or reload units, and does not speak D-Bus.
//
//	h := systemd.Host{Systemctl: systemd.Systemctl}
//	plan, err := h.Plan(ctx, "nginx", systemd.Drain{Ebb: "/usr/bin/ebb", Grace: 30 * time.Second})
//	fmt.Print(plan.Diff())
//	err = h.Apply(ctx, plan)
//	err = h.Disable(ctx, "nginx")
//
//	err = systemd.Notify(systemd.Ready) // in a service of Type=notify
package systemd
