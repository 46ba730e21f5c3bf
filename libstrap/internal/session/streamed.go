package session

// streamed is the lane of packets larger than a region: the elements go through two halves of a
// region, and the writer compresses and writes one while the call fills the other.
type streamed struct {
	packer  *packer
	staging *staging
}

// emit begins a packet and hands over its elements.
func (l *streamed) emit(e *emission, t *Tensor, c *call, p *part) error {
	half := min(l.staging.arena.MaxRegion()/4, maxPiece) &^ 63
	region, err := l.staging.takeRoom(c, 2*half+t.text())
	if err != nil {
		return err
	}
	it := l.packer.newPacket(streamEntry, e, t, p)
	it.region = region
	it.feed = newFeed(l.staging.arena, region, half, p.size)
	if err := l.staging.push(c, it); err != nil {
		return err
	}
	e.startPacket()
	e.feed, e.fed = it.feed, 0
	return l.rest(e, t, c, p)
}

// rest hands over the elements that the feed does not have yet.
func (l *streamed) rest(e *emission, t *Tensor, c *call, p *part) error {
	f, size := e.feed, int64(e.stored.Size())
	for e.fed < p.count {
		piece, err := l.staging.nextPiece(f, c)
		if err != nil {
			return err
		}
		n := min(int64(cap(piece))/size, p.count-e.fed)
		piece = piece[:n*size]
		l.packer.copy(e, t, piece, p.start+e.fed, n, nil)
		if e.fed += n; e.fed == p.count {
			f.error = l.packer.measure(e, t, p.count)
		}
		f.full <- piece
	}
	e.feed = nil
	f.release()
	return nil
}
