// SPDX-License-Identifier: Apache-2.0

package front

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/ebbproxy/ebb/internal/config"
)

const (
	// maxFile is more than a configuration may have, which then is refused in words.
	maxFile = 1<<20 + 1
	// maxParsed bounds what is read of one, whose defaults are written out.
	maxParsed = 32 << 20
	// parseTimeout is far more than the largest file takes on a machine that is very busy.
	parseTimeout = 30 * time.Second
)

// parsed is what a front that reads a configuration says.
type parsed struct {
	Config *config.Config `json:"config,omitempty"`
	Error  string         `json:"error,omitempty"`
}

// Load is config.Load by a front that lives for that alone; what it says is checked by the same rules again. It returns
// ErrUnavailable if none can be started, and not if one fails: whoever can make it fail must not get the core to read.
func Load(ctx context.Context, path string) (*config.Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, parseTimeout)
	defer cancel()
	cmd := command("--parse-config", path)
	out := &bounded{limit: maxParsed}
	said := &bounded{limit: 4 << 10}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(b), out, said
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })()
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("read the configuration in a process without privilege: %w: %s", err, bytes.TrimSpace(said.Bytes()))
	}
	var p parsed
	if err := decode(out.Bytes(), &p); err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	switch {
	case p.Error != "":
		return nil, errors.New(p.Error)
	case p.Config == nil:
		return nil, errors.New("read the configuration: the answer has none")
	}
	return p.Config, p.Config.Validate(path)
}

// Parse is the process of a front that reads a configuration from in, of the file named name.
func Parse(name string, in io.Reader, out io.Writer) error {
	if _, err := confine(); err != nil {
		return err
	}
	b, err := io.ReadAll(io.LimitReader(in, maxFile))
	if err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	var p parsed
	if p.Config, err = config.Parse(name, b); err != nil {
		p.Error = err.Error()
	}
	return json.NewEncoder(out).Encode(p)
}

// bounded keeps no more than limit bytes.
type bounded struct {
	bytes.Buffer
	limit int
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.Len()+len(p) > b.limit {
		return 0, errTooLong
	}
	return b.Buffer.Write(p)
}
