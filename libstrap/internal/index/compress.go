// Compresses and decompresses the record batches of an index with zstd.

package index

import (
	"encoding/binary"
	"sync"

	flatbuffers "github.com/google/flatbuffers/go"
	"github.com/klauspost/compress/zstd"
)

// A batch of at least leastCompressed bytes is written compressed, in Arrow's format. Each buffer is its
// length and a zstd frame, or -1 and the plain bytes.
const (
	firstCompressed = 4 // the version
	leastCompressed = 4 << 10
	zstdCodec       = 1  // Message.fbs, CompressionType
	notCompressed   = -1 // in place of a length
	// maxBatch is the most bytes that the buffers of a compressed batch may decompress to. maxRows
	// rows with maxText, maxPendingText and 64 dimensions have no more.
	maxBatch = 128 << 20
)

// zstdEncoder writes frames with checksums, so that wrong bytes do not become rows.
var zstdEncoder = sync.OnceValue(func() *zstd.Encoder {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(256<<10), zstd.WithLowerEncoderMem(true))
	if err != nil {
		panic("index: zstd encoder: " + err.Error()) // its options are constants
	}
	return e
})

var zstdDecoder = sync.OnceValue(func() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderMaxMemory(maxBatch))
	if err != nil {
		panic("index: zstd decoder: " + err.Error())
	}
	return d
})

// compressed returns a record batch message with its buffers compressed.
func compressed(m message) []byte {
	header, f := m.header, m.header.f
	node, nodes := header.vector(1, 16)
	buffer, buffers := header.vector(2, 16)
	pairs := make([][2]int64, 0, nodes+buffers)
	for k := range nodes {
		pairs = append(pairs, [2]int64{f.i64(node + 16*k), f.i64(node + 16*k + 8)})
	}
	var body []byte
	for k := range buffers {
		at, length := f.i64(buffer+16*k), f.i64(buffer+16*k+8)
		start := len(body)
		if plain := m.body[at : at+length]; length > 0 {
			body = binary.LittleEndian.AppendUint64(body, uint64(length))
			body = zstdEncoder().EncodeAll(plain, body)
			if len(body)-start >= 8+len(plain) {
				body = binary.LittleEndian.AppendUint64(body[:start], 1<<64-1) // notCompressed
				body = append(body, plain...)
			}
		}
		pairs = append(pairs, [2]int64{int64(start), int64(len(body) - start)})
		body = append(body, make([]byte, -len(body)&7)...)
	}
	return append(batchMetadata(header.i64(0), pairs[:nodes], pairs[nodes:], len(body)), body...)
}

// batchMetadata returns the bytes before the body of a compressed record batch.
func batchMetadata(rows int64, nodes, buffers [][2]int64, body int) []byte {
	b := flatbuffers.NewBuilder(4 << 10)
	structs := func(pairs [][2]int64) flatbuffers.UOffsetT {
		b.StartVector(16, len(pairs), 8)
		for k := len(pairs) - 1; k >= 0; k-- {
			b.PrependInt64(pairs[k][1])
			b.PrependInt64(pairs[k][0])
		}
		return b.EndVector(len(pairs))
	}
	nodesAt, buffersAt := structs(nodes), structs(buffers)
	b.StartObject(2) // BodyCompression: codec, method
	b.PrependByteSlot(0, zstdCodec, 0)
	compression := b.EndObject()
	b.StartObject(4) // RecordBatch: length, nodes, buffers, compression
	b.PrependInt64Slot(0, rows, 0)
	b.PrependUOffsetTSlot(1, nodesAt, 0)
	b.PrependUOffsetTSlot(2, buffersAt, 0)
	b.PrependUOffsetTSlot(3, compression, 0)
	batch := b.EndObject()
	b.StartObject(4) // Message: version, header type, header, length of the body
	b.PrependInt16Slot(0, metadataV5, 0)
	b.PrependByteSlot(1, batchType, 0)
	b.PrependUOffsetTSlot(2, batch, 0)
	b.PrependInt64Slot(3, int64(body), 0)
	b.Finish(b.EndObject())
	metadata := b.FinishedBytes()
	padding := -len(metadata) & 7
	out := binary.LittleEndian.AppendUint32(nil, continuation)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(metadata)+padding))
	return append(append(out, metadata...), make([]byte, padding)...)
}

// decompress decompresses a frame of size bytes into one of the room's buffers.
func (r *room) decompress(into int, frame []byte, size int64) ([]byte, *fault) {
	b, bad := grown(&r.buffers[into], size, r.budget)
	if bad != nil {
		return nil, bad
	}
	plain, err := zstdDecoder().DecodeAll(frame, b[:0])
	if err != nil {
		return nil, wrong("a compressed buffer: %v", err)
	}
	if int64(len(plain)) != size {
		return nil, wrong("a buffer decompresses to %d bytes, not %d", len(plain), size)
	}
	return plain, nil
}
