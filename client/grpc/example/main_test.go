// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/interop/grpc_testing"
)

// It runs, its stream ends by itself when SIGTERM comes, and it ends well.
func TestExample(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "example")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	cmd := exec.CommandContext(t.Context(), bin, "-listen", "127.0.0.1:0")
	cmd.Env = append(os.Environ(), "EBB_APP_SOCKET="+filepath.Join(t.TempDir(), "none.sock"))
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(stdout)
	line, err := r.ReadString('\n')
	addr, ok := strings.CutPrefix(strings.TrimSpace(line), "listening ")
	if err != nil || !ok {
		t.Fatalf("got %q, %v", line, err)
	}
	cc, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	c := grpc_testing.NewTestServiceClient(cc)
	if _, err := c.EmptyCall(t.Context(), &grpc_testing.Empty{}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	st, err := c.StreamingOutputCall(t.Context(), &grpc_testing.StreamingOutputCallRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = st.Recv()
	}
	if err != io.EOF {
		t.Errorf("end of the stream: got %v, want EOF", err)
	}
	kill := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() }) // it may have ended
	defer kill.Stop()
	rest, err := io.ReadAll(r)
	if err != nil || string(rest) != "flush zero\n" {
		t.Errorf("got %q, %v; want one flush, for zero", rest, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("it ended badly: %v", err)
	}
}
