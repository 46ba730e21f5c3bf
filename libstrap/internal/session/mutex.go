// The ranks of locks, which give the order to take them in.

package session

// rank is a type that stands for a place in the order of the locks; see the package's documentation.
type rank interface{ rank() int }

type (
	emissionRank struct{}
	sinkRank     struct{}
	intakeRank   struct{}
	pendingRank  struct{}
	ringRank     struct{}
	leafRank     struct{}
)

func (emissionRank) rank() int { return 0 }
func (sinkRank) rank() int     { return 1 }
func (intakeRank) rank() int   { return 2 }
func (pendingRank) rank() int  { return 3 }
func (ringRank) rank() int     { return 4 }
func (leafRank) rank() int     { return 5 }
