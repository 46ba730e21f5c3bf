package session

// Intake holds small tensors that the host has handed over, until it passes them to Enqueue. It
// also holds the notes that came behind these tensors. Package intake implements it. The session
// calls these methods from several goroutines at once.
type Intake interface {
	// Waiting returns the number of tensors that it holds.
	Waiting() int
	// Empty reports whether it holds neither a tensor nor a note.
	Empty() bool
	// Tick enqueues what it holds, as far as nothing has to be waited for. The writer alone calls it,
	// every 50 ms, and more often while the session is closing.
	Tick() error
	// Shut makes it take no more tensors. The session shuts it before it refuses its first call.
	Shut()
	// Close gives up what it holds and returns the number of tensors. The session calls it once,
	// when it has ended.
	Close() (lost int)
}

// noIntake is the Intake of a session that has none.
type noIntake struct{}

func (noIntake) Waiting() int { return 0 }
func (noIntake) Empty() bool  { return true }
func (noIntake) Tick() error  { return nil }
func (noIntake) Shut()        {}
func (noIntake) Close() int   { return 0 }
