// Copies the packets of a ring file, which a dead process has left, to a new stream.

package salvage

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/libstrap/strap/libstrap/internal/memory"
	"github.com/libstrap/strap/libstrap/internal/ringfile"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// RingReport tells what the new stream has of a ring file.
type RingReport struct {
	Packets   uint64 // in the new stream
	Bytes     int64  // length of the new stream
	Damaged   uint64 // packets whose elements do not agree with their checksum; they are left out
	PID       int32  // of the process that left the file
	CaptureID string
	Steps     []RingStep // in the order of the new stream
	Problem   string     // of the file; "" if there is none
}

// RingStep is what the new stream has of a step.
type RingStep struct {
	Step        int64  // its number; -1: unknown
	Packets     uint64 // in the new stream
	Ended       bool   // the process has told that it enqueued all tensors of the step
	Missing     uint64 // packets that the step had when it ended, and the new stream lacks
	NotCaptured uint64 // tensors that the process could not capture
	Model       string
}

// Whole reports whether all tensors of the step are in the new stream.
func (s *RingStep) Whole() bool { return s.Ended && s.Missing == 0 && s.NotCaptured == 0 }

// incomplete says why a step is not whole; "": it is.
func (s *RingStep) incomplete() string {
	switch {
	case !s.Ended:
		return "the ring file does not say that this step had ended"
	case s.Missing > 0:
		return fmt.Sprintf("%d packets of this step are not in the ring file", s.Missing)
	case s.NotCaptured > 0:
		return fmt.Sprintf("%d tensors of this step could not be captured", s.NotCaptured)
	}
	return ""
}

// Ring writes the packets of the ring file at src to a new stream at dst, with an index. The payloads are raw.
// It does not change src. The new files appear when they are complete and durable. Behind the packets of a step
// that is not whole, the index has a note that says why.
//
// A packet is taken if its record and its elements agree with their checksums.
//
// Errors: those of ringfile.Open and Salvage.
func Ring(src, dst string, o Options) (RingReport, error) {
	f, head, err := ringfile.Open(src)
	if err != nil {
		return RingReport{}, err
	}
	defer f.Close()
	s := &salvage{path: src, f: f, progress: o.Progress}
	if err := s.measure(); err != nil {
		return RingReport{}, err
	}
	out, err := s.target(dst, o.Force)
	if err != nil {
		return RingReport{}, err
	}
	r := ringSalvage{salvage: s, report: RingReport{PID: head.PID, CaptureID: head.CaptureID}}
	if s.size < head.Size {
		r.report.Problem = fmt.Sprintf("the file has %d of its %d bytes", s.size, head.Size)
	}
	s.ahead = s.size + min(s.size, head.Size)
	if r.file, err = ringfile.NewReader(s, min(s.size, head.Size), &head); err != nil {
		return RingReport{}, err
	}
	if err := r.find(); err != nil {
		return RingReport{}, err
	}
	if err := s.write(out, head.CaptureID, func(c *copier) error { return r.copy(c, head.Rank) }); err != nil {
		return RingReport{}, err
	}
	r.report.Bytes = s.report.Bytes
	return r.report, nil
}

type ringSalvage struct {
	*salvage
	file    *ringfile.Reader
	packets []ringPacket
	steps   map[uint64]*RingStep // by the number of their first packet
	marks   map[uint64]ringfile.Mark
	report  RingReport
}

// ringPacket is a packet that is whole.
type ringPacket struct {
	at            int64 // offset of the record
	number, first uint64
}

// packetCost is about the bytes of memory that a packet takes, and a step.
const packetCost, stepCost = 24 * 2, 200

// find finds the packets that are whole, and puts them in the order in which they came.
func (r *ringSalvage) find() error {
	r.steps, r.marks = map[uint64]*RingStep{}, map[uint64]ringfile.Mark{}
	var budget memory.Budget
	err := r.file.Scan(func(p *ringfile.Record) error {
		if p.Mark.Ended {
			r.marks[p.First] = p.Mark
		}
		step := r.steps[p.First]
		cost := int64(packetCost)
		if step == nil {
			cost += stepCost
		}
		if err := budget.Take(cost); err != nil {
			return err
		}
		if step == nil {
			step = &RingStep{Step: p.Row.Step, Model: p.Row.Model}
			r.steps[p.First] = step
		}
		step.Step = max(step.Step, p.Row.Step) // a tensor from outside of any step has -1
		sum, err := r.sum(p.At, p.Bytes, nil)
		if err != nil {
			return err
		}
		if sum != p.Row.CRC {
			r.report.Damaged++
			return nil
		}
		step.Packets++
		r.packets = append(r.packets, ringPacket{p.Row.Offset, p.Number, p.First})
		return nil
	})
	if err != nil {
		return err
	}
	for first, step := range r.steps {
		mark := r.marks[first]
		step.Ended, step.NotCaptured = mark.Ended, uint64(mark.Others)
		if uint64(mark.Packets) > step.Packets {
			step.Missing = uint64(mark.Packets) - step.Packets
		}
	}
	slices.SortFunc(r.packets, func(a, b ringPacket) int { return cmp.Compare(a.number, b.number) })
	return nil
}

// copy writes the packets and rows, and behind each step that is not whole a note.
func (r *ringSalvage) copy(c *copier, rank int32) error {
	left := map[uint64]uint64{} // packets of each step that are still to come
	for first, step := range r.steps {
		left[first] = step.Packets
	}
	for _, p := range r.packets {
		rec, ok, err := r.file.Record(p.at)
		if err != nil {
			return err
		}
		if !ok || rec.Number != p.number {
			return r.changes(p.at)
		}
		rec.Row.Sequence, rec.Row.Rank = c.next, rank
		if err := r.packet(c, &rec); err != nil {
			return err
		}
		step := r.steps[p.first]
		if left[p.first] == step.Packets {
			r.report.Steps = append(r.report.Steps, *step)
		}
		if left[p.first]--; left[p.first] > 0 {
			continue
		}
		if err := step.note(c, rank); err != nil {
			return err
		}
	}
	for _, step := range r.steps {
		if step.Packets > 0 {
			continue
		}
		r.report.Steps = append(r.report.Steps, *step)
		if err := step.note(c, rank); err != nil {
			return err
		}
	}
	return nil
}

// note notes in the index why a step is not whole.
func (s *RingStep) note(c *copier, rank int32) error {
	why := s.incomplete()
	if why == "" {
		return nil
	}
	return c.append(&wire.Row{
		Sequence: c.next, Offset: -1, Parts: 1, Model: s.Model, Step: s.Step, Token: -1, Rank: rank,
		Codec: "none", MSE: math.NaN(), MeanSquare: math.NaN(), Error: why,
	})
}

// packet writes a packet and its row.
func (r *ringSalvage) packet(c *copier, p *ringfile.Record) error {
	name := p.Row.Name()
	f := found{at: p.At - int64(wire.HeaderSize+len(name)), end: p.At + p.Bytes, payload: p.At}
	if len(name) == 0 && p.Bytes == 0 { // six zero bytes are not for a stream
		p.Row.Offset, p.Row.Length = -1, 0
		return c.append(&p.Row)
	}
	sum, err := c.packet(f, name)
	if err != nil {
		return err
	}
	if sum != p.Row.CRC {
		return r.changes(p.Row.Offset)
	}
	r.report.Packets++
	return c.row(f, &p.Row)
}

func (r *ringSalvage) changes(at int64) error {
	return status.New(status.IO, "%q changes while it is read: packet at byte %d", r.path, at)
}
