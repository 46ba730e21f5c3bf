// Decodes archive payloads.

package codec

import (
	"bytes"
	"encoding/binary"
	"io"

	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// ArchiveType returns the element type in the header of an archive payload. prefix begins with the
// header. ArchiveType returns 0 if prefix is not the header of an archive.
func ArchiveType(prefix []byte) wire.DType {
	h, err := parseArchive(prefix)
	if err != nil {
		return 0
	}
	return h.dtype
}

// archiveHead is the header of an archive payload.
type archiveHead struct {
	dtype wire.DType
	count int64
}

// parseArchive parses the header. Errors: Corrupt; Unsupported for a later version.
func parseArchive(b []byte) (h archiveHead, err error) {
	if len(b) < archiveHeader || le32(b) != archiveMagic {
		return h, corrupt(nil, "no archive")
	}
	block := binary.LittleEndian.Uint16(b[6:])
	h = archiveHead{dtype: wire.DType(b[5]), count: int64(le32(b[8:]))}
	switch {
	case b[4] != archiveVersion:
		return h, status.New(status.Unsupported, "archive version %d: this release reads %d", b[4], archiveVersion)
	case block != archiveBlock:
		return h, corrupt(nil, "an archive with blocks of %d", block)
	case h.dtype != wire.Float16 && h.dtype != wire.BFloat16:
		return h, corrupt(nil, "an archive of element type %d", b[5])
	}
	return h, nil
}

// unarchiver reads the elements of an archive payload. It takes the memory of one chunk, whatever the
// payload claims.
type unarchiver struct {
	src     io.Reader
	dtype   wire.DType
	left    int64  // elements of the next chunks
	rest    []byte // part of out that is not yet read
	out     [2 * archiveChunk]byte
	codes   [archiveChunk]byte
	scales  [2 * archiveChunk / archiveBlock]byte
	exact   [2 * archiveChunk]byte
	encoded [2*archiveChunk + archiveSlack]byte
}

var unarchivers = newSpares(func() *unarchiver { return &unarchiver{} })

func withArchive(payload io.Reader, use func(r io.Reader, size int64) error) error {
	u := unarchivers.Get()
	defer func() {
		u.src, u.rest = nil, nil
		unarchivers.Put(u)
	}()
	head := u.out[:archiveHeader]
	if _, err := io.ReadFull(payload, head); err != nil {
		return corrupt(unexpected(err), "no archive")
	}
	h, err := parseArchive(head)
	if err != nil {
		return err
	}
	u.src, u.dtype, u.left = payload, h.dtype, h.count
	return use(u, 2*h.count)
}

func (u *unarchiver) Read(p []byte) (int, error) {
	if len(u.rest) == 0 && len(p) > 0 {
		if u.left == 0 {
			return 0, io.EOF
		}
		if err := u.chunk(); err != nil {
			return 0, err
		}
	}
	n := copy(p, u.rest)
	u.rest = u.rest[n:]
	return n, nil
}

// chunk decodes the next chunk to out.
func (u *unarchiver) chunk() error {
	n := int(min(u.left, archiveChunk))
	lengths := u.encoded[:archiveChunkHeader]
	if _, err := io.ReadFull(u.src, lengths); err != nil {
		return unexpected(err)
	}
	scales, codes, exact := le32(lengths), le32(lengths[4:]), le32(lengths[8:])
	out := u.out[:2*n]
	var err error
	if scales == 0 && codes == 0 {
		err = u.frame(out, exact)
	} else {
		err = u.quantised(out, scales, codes, exact)
	}
	if err != nil {
		return err
	}
	u.rest, u.left = out, u.left-int64(n)
	return nil
}

// quantised decodes a chunk to out. scales, codes and exact are the lengths of its frames.
func (u *unarchiver) quantised(out []byte, scales, codes, exact uint32) error {
	n := len(out) / 2
	if err := u.frame(u.scales[:2*blocksOf(n)], scales); err != nil {
		return err
	}
	if err := u.frame(u.codes[:n], codes); err != nil {
		return err
	}
	restore(out, u.codes[:n], u.scales[:], u.dtype)
	left := u.exact[:2*bytes.Count(u.codes[:n], []byte{codeExact})]
	if len(left) == 0 {
		if exact != 0 {
			return corrupt(nil, "%d bytes of exact elements, for none", exact)
		}
		return nil
	}
	if err := u.frame(left, exact); err != nil {
		return err
	}
	for i := 0; len(left) > 0; i++ {
		i += bytes.IndexByte(u.codes[i:n], codeExact)
		copy(out[2*i:2*i+2], left)
		left = left[2:]
	}
	return nil
}

// frame decodes a zstd frame of length bytes, which must fill dst.
func (u *unarchiver) frame(dst []byte, length uint32) error {
	if int64(length) > int64(len(u.encoded)) {
		return corrupt(nil, "a frame of %d bytes for %d", length, len(dst))
	}
	b := u.encoded[:length]
	if _, err := io.ReadFull(u.src, b); err != nil {
		return unexpected(err)
	}
	if DecodeSmall(dst, Zstd, b) {
		return nil
	}
	return Decode(dst, Zstd, bytes.NewReader(b))
}
