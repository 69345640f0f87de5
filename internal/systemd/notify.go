// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
)

// States that a service tells its manager, sd_notify(3).
const (
	Ready     = "READY=1"     // start-up, or a reload, is over
	Reloading = "RELOADING=1" // the configuration is read again; Ready follows, whatever came of it
	Stopping  = "STOPPING=1"  // the service is about to end
	Watchdog  = "WATCHDOG=1"  // the service is alive; to be told more often than WatchdogSec=, systemd.service(5)
)

// Status is the state that `systemctl status` shows as a line of text.
func Status(text string) string { return "STATUS=" + strings.ReplaceAll(text, "\n", " ") }

// Notify tells the manager one or several states at once. Without a manager that listens (NOTIFY_SOCKET is empty) it
// does nothing. It is safe for concurrent use, and does not block for longer than a full socket buffer does.
func Notify(states ...string) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if path[0] != '/' && path[0] != '@' { // the net package knows @ as the abstract namespace of unix(7)
		return fmt.Errorf("notify the manager: NOTIFY_SOCKET %q is neither a path nor an abstract socket", path)
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify the manager: %w", err)
	}
	_, err = conn.Write([]byte(strings.Join(states, "\n")))
	if err = errors.Join(err, conn.Close()); err != nil {
		return fmt.Errorf("notify the manager: %w", err)
	}
	return nil
}
