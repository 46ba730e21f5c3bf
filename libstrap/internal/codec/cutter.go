// Cuts a source into the blocks of a frame.

package codec

// cutter cuts a source into blocks and passes each block to put. A block that one write holds in full
// is not copied. Other blocks are collected in rest first.
type cutter struct {
	put   func(block []byte, last bool) error
	block int    // bytes of a block; the last block has the rest
	left  int64  // source bytes still to come
	rest  []byte // the beginning of a block
}

func (c *cutter) begin(block int, size int64) {
	c.block, c.left, c.rest = block, size, c.rest[:0]
}

func (c *cutter) Write(b []byte) (int, error) {
	c.left -= int64(len(b))
	for rest := b; len(rest) > 0; {
		n := min(len(rest), c.block-len(c.rest))
		piece := rest[:n]
		rest = rest[n:]
		last := c.left == 0 && len(rest) == 0
		if len(c.rest) > 0 || n < c.block && !last {
			c.rest = append(c.rest, piece...)
			if len(c.rest) < c.block && !last {
				break
			}
			piece, c.rest = c.rest, c.rest[:0]
		}
		if err := c.put(piece, last); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}

// Close does nothing: the last byte of the source ended the last block.
func (c *cutter) Close() error { return nil }
