package session

import (
	"time"

	"github.com/libstrap/strap/libstrap/internal/codec"
)

// effort is how much work is put into a packet: less where otherwise a caller would soon
// wait for room because packets are made more slowly than tensors come. Not where it is the
// disk that is slow, which larger packets would make worse; nor while somebody waits for what
// is there to be written, for then no more comes; nor at the target rate and above.
func (s *Session) effort() codec.Effort {
	if s.opts.TargetRate == 0 || s.opts.Codec == codec.None {
		return codec.Full
	}
	rests := s.jobs.Rests() // what waits in any case
	room := s.arena.Limit() - rests
	switch over := s.jobs.Waiting() - rests; {
	case over <= room/2, s.drains.Load() > 0, s.awaitingDisk() > s.arena.Limit()/4, s.onTarget():
		return codec.Full
	case over <= room*3/4:
		return codec.Quick
	default:
		return codec.Stored
	}
}

// awaitingDisk is how many staged bytes no worker has to do with any more.
func (s *Session) awaitingDisk() int64 {
	_, _, held := s.arena.Usage()
	return held - s.jobs.Waiting()
}

// onTarget reports whether tensors come at the target rate.
func (s *Session) onTarget() bool {
	_, bytes := s.taken()
	return float64(bytes) >= s.opts.TargetRate*time.Since(s.opened).Seconds()
}
