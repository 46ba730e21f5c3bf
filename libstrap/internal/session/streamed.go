// The lane of packets that are larger than a region of the arena.

package session

// streamed is the lane of packets larger than a region: the elements go through two halves of a
// region, and the writer compresses and writes one while the call fills the other.
type streamed struct {
	entries *entries
	staging *staging
}

// emit begins a packet and hands over its elements.
func (l *streamed) emit(e *emission, c *call) error {
	half := min(l.staging.arena.MaxRegion()/4, maxPiece) &^ 63
	region, err := l.staging.takeRoom(c, 2*half, e.text)
	if err != nil {
		return err
	}
	it := e.newPacket(streamEntry, l.entries)
	it.region = region
	it.feed = newFeed(l.staging.arena, region, half, e.part.size)
	if err := l.staging.push(c, it); err != nil {
		return err
	}
	e.begun, e.feed, e.fed = true, it.feed, 0
	return l.rest(e, c)
}

// rest hands over the elements that the feed does not have yet.
func (l *streamed) rest(e *emission, c *call) error {
	f, p, size := e.feed, &e.part, int64(e.stored.Size())
	for e.fed < p.count {
		piece, err := l.staging.nextPiece(f, c)
		if err != nil {
			return err
		}
		n := min(int64(cap(piece))/size, p.count-e.fed)
		piece = piece[:n*size]
		e.copy(piece, p.start+e.fed, n, nil)
		if e.fed += n; e.fed == p.count {
			f.loss = e.measure()
		}
		f.full <- piece
	}
	e.feed = nil
	f.release()
	return nil
}
