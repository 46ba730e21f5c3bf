// One call of the host: how long it may wait, and its turn.

package session

import "time"

// call is one call of the host: how long it may wait, and its turn in the line.
type call struct {
	turn
	need       int           // bytes that it asks for; see line.Keep
	refuse     chan struct{} // closed when the call may wait no longer
	limit      time.Duration // negative: none
	timer      *time.Timer   // runs from the first wait on
	over       chan struct{} // closed when the limit has passed
	stalled    bool          // it counts as a stall already
	fromIntake bool          // see Tensor.fromIntake
	step       int64         // of its tensor
}

// past is the Done of a call with the limit 0.
var past = func() chan struct{} {
	over := make(chan struct{})
	close(over)
	return over
}()

// Done returns a channel that closes when the limit has passed, counted from the first Done.
// Without a limit it returns nil, which never closes.
func (c *call) Done() <-chan struct{} {
	if c.limit == 0 {
		return past
	}
	if c.limit > 0 && c.timer == nil {
		over := make(chan struct{})
		c.over, c.timer = over, time.AfterFunc(c.limit, func() { close(over) })
	}
	return c.over
}

// stop ends the clock.
func (c *call) stop() {
	if c.timer != nil {
		c.timer.Stop()
	}
}
