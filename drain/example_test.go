// SPDX-License-Identifier: Apache-2.0

package drain_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ebbproxy/ebb/drain"
)

// shop is a World with one request in flight, which ends after a while.
type shop struct {
	active atomic.Int64
}

func (s *shop) Journal(r drain.Record) error { fmt.Println("journal:", r.Type); return nil }
func (s *shop) SetReady(ready bool)          { fmt.Println("ready:", ready) }
func (s *shop) Emit(drain.Event)             {}

func (s *shop) CloseAdmission(context.Context, time.Time) error {
	fmt.Println("no new connections")
	time.AfterFunc(50*time.Millisecond, func() { s.active.Store(0) })
	return nil
}

func (s *shop) OpenAdmission(context.Context) error                 { return nil }
func (s *shop) Notify(context.Context, drain.Notice) error          { return nil }
func (s *shop) Settled(context.Context) (drain.Pending, error)      { return drain.Pending{}, nil }
func (s *shop) Retire(context.Context) (int, error)                 { return 0, nil }
func (s *shop) Survivors(context.Context) ([]drain.Survivor, error) { return nil, nil }
func (s *shop) Kill(context.Context) error                          { return nil }
func (s *shop) Cut(context.Context, drain.CutRequest) (drain.CutReport, error) {
	return drain.CutReport{}, nil
}

func (s *shop) Look(context.Context) (drain.Counts, error) {
	return drain.Counts{Known: true, Active: s.active.Load(), Accepted: 1}, nil
}

func (s *shop) Flush(_ context.Context, r drain.FlushRequest) error {
	fmt.Println("flush:", r.Reason)
	return nil
}

func Example() {
	world := &shop{}
	world.active.Store(1)
	m, err := drain.New(drain.Options{Backend: "web", Gen: 7, World: world})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()

	st, err := m.Begin(ctx, drain.Request{
		Cause:  drain.CauseSignal,
		Policy: drain.Policy{OnNew: drain.OnNewRefuse, QuietPeriod: 200 * time.Millisecond},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(st.State, st.Admission)
	<-m.Done()
	fmt.Println(m.Status().Outcome)
	cancel()
	fmt.Println(<-ended)

	// Output:
	// journal: begin
	// ready: false
	// no new connections
	// draining closed
	// journal: flush
	// flush: zero
	// journal: end
	// drained
	// <nil>
}

func ExampleValidate() {
	_, err := drain.Validate(drain.Policy{Grace: 10 * time.Second, FlushTimeout: 8 * time.Second})
	fmt.Println(err)
	budget, err := drain.Validate(drain.Policy{Grace: 10 * time.Second, FlushTimeout: 3 * time.Second})
	fmt.Println(budget, err)

	// Output:
	// the policy contradicts itself: grace 10s − flush_timeout 8s − reserve 3s leaves -1s to wait: lengthen grace beyond 11s or shorten the others
	// grace 10s = wait 4s + flush_timeout 3s + reserve 3s; quiet_period 1s, admit_for 2s, settle 1.333s, close_spread 0s <nil>
}
