// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"

	"github.com/vishvananda/netlink"

	"github.com/ebbproxy/ebb/internal/netns"
)

// link is how a client reaches its server.
type link string

const (
	loopback link = "loopback"
	veth     link = "veth"
)

// space is where one sample is taken: network namespaces that nobody has used before, so that no sample finds the
// closed connections of another.
type space struct {
	client, server *os.File // the same one for loopback
	addr           string   // of the server
}

func newSpace(l link) (_ *space, err error) {
	s := &space{addr: "127.0.0.1:80"}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.server, err = newNetNS(); err != nil {
		return nil, err
	}
	if l == loopback {
		s.client = s.server
		return s, nil
	}
	if s.client, err = newNetNS(); err != nil {
		return nil, err
	}
	// The addresses are of a range for documentation (RFC 5737).
	s.addr = "192.0.2.2:80"
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Namespace = "bench0", netlink.NsFd(int(s.client.Fd()))
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerNamespace = "bench0", netlink.NsFd(int(s.server.Fd()))
	if err := inside(s.client, func() error { return netlink.LinkAdd(pair) }); err != nil {
		return nil, fmt.Errorf("add veth pair: %w", err)
	}
	for i, ns := range []*os.File{s.client, s.server} {
		ip := net.IPv4(192, 0, 2, byte(i+1))
		if err := inside(ns, func() error {
			dev, err := netlink.LinkByName("bench0")
			if err != nil {
				return err
			}
			if err := netlink.AddrAdd(dev, &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: net.CIDRMask(30, 32)}}); err != nil {
				return err
			}
			return netlink.LinkSetUp(dev)
		}); err != nil {
			return nil, fmt.Errorf("set up veth: %w", err)
		}
	}
	return s, nil
}

// newNetNS makes a namespace with lo up and reno, which every kernel has and which paces nothing by a timer.
func newNetNS() (*os.File, error) {
	ns, err := netns.New()
	if err != nil {
		return nil, err
	}
	if err := inside(ns, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return err
		}
		return os.WriteFile("/proc/sys/net/ipv4/tcp_congestion_control", []byte("reno"), 0)
	}); err != nil {
		return nil, errors.Join(fmt.Errorf("set up network namespace: %w", err), ns.Close())
	}
	return ns, nil
}

func inside(ns *os.File, f func() error) error { return netns.Do(int(ns.Fd()), f) }

// start starts a process in a namespace: a child is born in that of the thread that forks.
func start(ns *os.File, cmd *exec.Cmd) error { return inside(ns, cmd.Start) }

func (s *space) close() error {
	var errs []error
	if s.client != nil && s.client != s.server {
		errs = append(errs, s.client.Close())
	}
	if s.server != nil {
		errs = append(errs, s.server.Close())
	}
	return errors.Join(errs...)
}
