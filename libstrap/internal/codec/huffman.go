// The Huffman coder of literals, as RFC 8878, section 4.2, describes it.

package codec

import (
	"encoding/binary"
	"math"
	"math/bits"
	"slices"

	"github.com/klauspost/compress/fse"
)

const (
	huffMaxBits  = 11      // of a code, RFC 8878, 4.2.1
	huffWeights  = 128     // most weights that can be stored as nibbles, 4.2.1.1
	huffJump     = 6       // bytes of the Jump_Table of four streams, 3.1.1.3.1.6
	huffSlack    = 16      // bytes that the last store of a stream may write beyond its codes
	huffRoom     = 256     // bytes for a tree, the Jump_Table and four times huffSlack
	huffWordBits = 12      // most bits of a word that is counted
	huffWordsMin = 8 << 10 // least bytes of a source whose words are counted

	// Of a source of at least sampleMin bytes, samplePiece of each sampleStride words are counted. The
	// place of the piece in the stride moves by sampleStep from stride to stride, so that the sample has
	// words of all columns, whatever the length of a row is.
	sampleMin    = 96 << 10
	samplePiece  = 128
	sampleStride = sampleEach*samplePiece + 32
	sampleStep   = 164
	sampleEach   = 4 // about so many words stand behind one that is counted
	// A sample is not used if it has fewer than sampleLeast different bytes, or if more than
	// unseenMost other bytes may occur: codes for bytes that do not occur would cost too much.
	sampleLeast = 16
	unseenMost  = 96
)

// huffman codes literals, RFC 8878, 4.2: a tree, and one or four streams. huff0 of
// klauspost/compress does the same. The loops in C (huffman.c) are faster than huff0. Their twin,
// huffStream.close, is slower.
//
// 16-bit floats of few mantissa bits end in zeros. If all words of a source do, the loops in C count
// words instead of bytes. shift is the number of zeros. With AVX2 and NEON the loops also look up the
// codes of both bytes of a word at once.
type huffman struct {
	bytes  [4][256]uint32               // counts of bytes, in four parts that do not wait for each other
	words  [4][1 << huffWordBits]uint16 // counts of words without their zeros, in four parts
	count  [256]uint32                  // of each byte
	length [256]uint8                   // of a byte's code, 0 if the byte does not occur
	code   [256]huffCode
	short  [256]uint16                 // code << 4 | its length
	joined [1 << huffWordBits]huffCode // the codes of a word's two bytes
	sorted []huffLeaf                  // the bytes that occur, the rarest first
	spare  []huffLeaf
	parent [512]uint16
	weight [256]byte
	fse    fse.Scratch
	out    []byte // empty, with room

	shift    uint // zero bits at the end of all 16-bit words
	wordwise bool // codes are looked up in joined
	kernel   bool // the loops in C are used; little endian machines only
	wide     bool // the loop with AVX-512 is used; it looks up codes in short
}

// newHuffman returns a coder that uses the fastest loops of the level in use.
func newHuffman() huffman {
	_, kernel := kernelInUse()
	return huffman{kernel: kernel, wide: usesWide()}
}

// huffCode is a code in the highest bits and its length in the lowest byte.
type huffCode uint64

func newHuffCode(code uint64, length uint8) huffCode {
	return huffCode(code<<(64-length) | uint64(length))
}

func (c huffCode) length() uint8 { return uint8(c) }

// huffLeaf is a byte in the lowest eight bits, below its count.
type huffLeaf uint32

func (l huffLeaf) value() uint8 { return uint8(l) }
func (l huffLeaf) count() int   { return int(l >> 8) }

// compress returns the tree's description and the streams of len(src) > 1 literals, or nil if they
// are not smaller than src. single asks for one stream instead of four. distinct is how many different
// bytes src has; with 1 there is no tree. The result is valid until the next call.
func (h *huffman) compress(src []byte, single bool) (data []byte, distinct int) {
	words := len(src) >= huffWordsMin && h.guessShift(src) &&
		(len(src) >= sampleMin && h.sampleWords(src) || h.countWords(src))
	if !words {
		h.countBytes(src)
	}
	h.wordwise = words && h.kernel && !h.wide
	if distinct = h.build(); distinct < 2 {
		return nil, distinct
	}
	// A tree takes more than two bits for each distinct byte. For a short source, describing the tree
	// takes more time than coding: stop before if it cannot pay.
	if h.bits()/8+distinct/4 >= len(src) {
		return nil, distinct
	}
	if room := len(src)*huffMaxBits/8 + huffRoom; cap(h.out) < room {
		h.out = make([]byte, 0, room)
	}
	out, ok := h.describe(h.out)
	if !ok {
		return nil, distinct
	}
	if h.wordwise {
		h.joinCodes()
	}
	if single {
		return h.oneStream(out, src), distinct
	}
	return h.fourStreams(out, src), distinct
}

// countBytes counts the bytes of src.
func (h *huffman) countBytes(src []byte) {
	clear(h.bytes[0][:])
	clear(h.bytes[1][:])
	clear(h.bytes[2][:])
	clear(h.bytes[3][:])
	i := 0
	for ; i+8 <= len(src); i += 8 {
		v := binary.LittleEndian.Uint64(src[i:])
		h.bytes[0][byte(v)]++
		h.bytes[1][byte(v>>8)]++
		h.bytes[2][byte(v>>16)]++
		h.bytes[3][byte(v>>24)]++
		h.bytes[0][byte(v>>32)]++
		h.bytes[1][byte(v>>40)]++
		h.bytes[2][byte(v>>48)]++
		h.bytes[3][byte(v>>56)]++
	}
	for _, b := range src[i:] {
		h.bytes[0][b]++
	}
	for b := range h.count {
		h.count[b] = h.bytes[0][b] + h.bytes[1][b] + h.bytes[2][b] + h.bytes[3][b]
	}
}

// guessShift guesses shift from 256 words of src. It returns false if the words have too few zeros.
func (h *huffman) guessShift(src []byte) bool {
	const sample = 64 // words of 8 bytes
	step := len(src) / sample
	var all uint64
	for i := range sample {
		all |= binary.LittleEndian.Uint64(src[min(i*step, len(src)-8)&^1:])
	}
	h.shift = trailingZeros(all)
	return 16-h.shift <= huffWordBits
}

// countWords sets count from the words of src, which has at most literalsBlock bytes. If a word has
// fewer zeros than guessed, countWords corrects shift and counts again. It returns false if the words
// have too few zeros.
func (h *huffman) countWords(src []byte) bool {
	for 16-h.shift <= huffWordBits {
		zeros := trailingZeros(h.countShifted(src))
		if zeros >= h.shift {
			h.addWords(1, src[len(src)&^7:])
			return true
		}
		h.shift = zeros
	}
	return false
}

// sampleWords estimates count from a part of the words. A byte that may occur has a count of at least
// 1: the extent of all words tells which bytes these are, if the words are floats of few mantissa
// bits. sampleWords returns false if the sample is not to be used.
func (h *huffman) sampleWords(src []byte) bool {
	whole := len(src) / (2 * sampleStride) * (2 * sampleStride)
	x := h.extentOf(src[:whole])
	rest := src[whole:]
	for i, b := range rest {
		x.all |= uint16(b) << (i % 2 * 8)
	}
	h.shift = uint(bits.TrailingZeros16(x.all))
	if 16-h.shift > huffWordBits || x.most == 0 {
		return false
	}
	h.clearWords()
	h.countPieces(src[:whole], samplePiece, sampleStride, sampleStep)
	h.addWords(sampleEach, rest)
	seen := h.distinct()
	h.addUnseen(x)
	return seen >= sampleLeast && h.distinct()-seen <= unseenMost
}

// extent bounds the 16-bit words of a source. The magnitude of a word is the word without its highest
// bit, which is the sign of a float.
type extent struct {
	all   uint16 // the OR of all words
	least uint16 // the smallest magnitude above 0, minus 1; math.MaxUint16 if all words are 0
	most  uint16 // the largest magnitude
}

// extentOf returns the extent of the words of src. len(src) is a positive multiple of 64.
func (h *huffman) extentOf(src []byte) extent { return extentOf(src, h.kernel, h.wide) }

// extentOf is that of a coder which uses the loops in C, or those with AVX-512.
func extentOf(src []byte, kernel, wide bool) extent {
	if kernel {
		return extentKernel(src, wide)
	}
	x := extent{least: math.MaxUint16}
	for ; len(src) > 0; src = src[2:] {
		v := binary.LittleEndian.Uint16(src)
		magnitude := v &^ (1 << 15)
		x.all |= v
		x.least = min(x.least, magnitude-1)
		x.most = max(x.most, magnitude)
	}
	return x
}

// addUnseen sets count to 1 for each byte that no word of the sample has, but another word may have.
func (h *huffman) addUnseen(x extent) {
	add := func(b int) { h.count[b] = max(h.count[b], 1) }
	low := 1 << min(h.shift, 8) // the distance of two low bytes
	for b := 0; b < 256; b += low {
		add(b)
	}
	high := max(1<<h.shift>>8, 1) // the distance of two high bytes
	add(0)
	add(0x80)
	for b := int(x.least+1) >> 8 / high * high; b <= int(x.most>>8); b += high {
		add(b)
		add(b | 0x80)
	}
}

// distinct returns how many different bytes are counted.
func (h *huffman) distinct() (n int) {
	for _, count := range h.count {
		if count > 0 {
			n++
		}
	}
	return n
}

// trailingZeros returns how many low bits are zero in each 16-bit word of all.
func trailingZeros(all uint64) uint {
	all |= all >> 32
	all |= all >> 16
	return uint(bits.TrailingZeros16(uint16(all)))
}

// countShifted counts the words of src, shifted, and returns the OR of all words. It does not count
// the last len(src) % 8 bytes, but includes them in the OR. An odd byte at the end is the low half of
// a word.
func (h *huffman) countShifted(src []byte) (all uint64) {
	h.clearWords()
	whole := len(src) &^ 7
	for i, b := range src[whole:] {
		all |= uint64(b) << (i % 2 * 8)
	}
	return all | h.countPieces(src[:whole], 4, 4, 0)
}

// countPieces counts piece words of each stride words of src, shifted. In the first stride these are the
// first words. In each next stride they begin step words later, modulo the room that is left in a stride.
// countPieces returns the OR of all counted groups of four words. len(src) is a multiple of 2*stride.
// piece, stride and step are multiples of 4.
func (h *huffman) countPieces(src []byte, piece, stride, step int) (all uint64) {
	if h.kernel && len(src) > 0 {
		return countWordsKernel(&h.words, h.shift, src, piece, stride, step)
	}
	const mask = 1<<huffWordBits - 1 // spares the checks of bounds
	from := 0
	for ; len(src) > 0; src = src[2*stride:] {
		at := src[2*from : 2*(from+piece)]
		from = (from + step) % (stride - piece + 4)
		for ; len(at) > 0; at = at[8:] {
			v := binary.LittleEndian.Uint64(at)
			all |= v
			h.words[0][uint64(uint16(v))>>(h.shift&63)&mask]++
			h.words[1][uint64(uint16(v>>16))>>(h.shift&63)&mask]++
			h.words[2][uint64(uint16(v>>32))>>(h.shift&63)&mask]++
			h.words[3][v>>48>>(h.shift&63)&mask]++
		}
	}
	return all
}

func (h *huffman) clearWords() {
	for i := range h.words {
		clear(h.words[i][:1<<(16-h.shift)])
	}
}

// addWords sets count from the counts of words, each times a factor, and the bytes of rest.
func (h *huffman) addWords(factor uint32, rest []byte) {
	clear(h.count[:])
	for w := range 1 << (16 - h.shift) {
		n := uint32(h.words[0][w]) + uint32(h.words[1][w]) + uint32(h.words[2][w]) + uint32(h.words[3][w])
		if n > 0 {
			h.count[byte(w<<h.shift)] += factor * n
			h.count[w<<h.shift>>8] += factor * n
		}
	}
	for _, b := range rest {
		h.count[b]++
	}
}

// build gives each byte that occurs a code. It returns how many bytes occur.
func (h *huffman) build() int {
	h.sorted = h.sorted[:0]
	for b, n := range h.count {
		if n > 0 {
			h.sorted = append(h.sorted, huffLeaf(n<<8|uint32(b)))
		}
	}
	if len(h.sorted) < 2 {
		return len(h.sorted)
	}
	h.sort()
	h.measure()
	h.limit()
	h.assign()
	return len(h.sorted)
}

// sort orders the leaves by their counts with a radix sort. For so few leaves, with mostly small
// counts, this is faster than comparing them.
func (h *huffman) sort() {
	const digit = 6
	most := huffLeaf(0)
	for _, l := range h.sorted {
		most = max(most, l)
	}
	h.spare = append(h.spare[:0], h.sorted...)
	for shift := 8; most>>shift > 0; shift += digit {
		var next [1 << digit]uint16
		for _, l := range h.sorted {
			next[l>>shift&(1<<digit-1)]++
		}
		place := uint16(0)
		for d, n := range next {
			next[d] = place
			place += n
		}
		for _, l := range h.sorted {
			at := &next[l>>shift&(1<<digit-1)]
			h.spare[*at] = l
			*at++
		}
		h.sorted, h.spare = h.spare, h.sorted
	}
}

// measure sets the lengths of an optimal code. It joins the two rarest nodes until one node is left.
// The leaves are sorted by count, and the joined nodes are made in this order.
func (h *huffman) measure() {
	n := len(h.sorted)
	var joined [256]int // counts of nodes n, n+1, ...
	leaf, inner := 0, 0
	for made := 0; made < n-1; made++ {
		for range 2 {
			node, count := 0, 0
			if inner >= made || leaf < n && h.sorted[leaf].count() <= joined[inner] {
				node, count = leaf, h.sorted[leaf].count()
				leaf++
			} else {
				node, count = n+inner, joined[inner]
				inner++
			}
			joined[made] += count
			h.parent[node] = uint16(n + made)
		}
	}
	var depth [512]uint8
	for node := 2*n - 3; node >= 0; node-- {
		depth[node] = depth[h.parent[node]] + 1
	}
	clear(h.length[:])
	for i, l := range h.sorted {
		h.length[l.value()] = depth[i]
	}
}

// limit shortens codes to the longest length that is allowed: by the format, and by the number of
// literals, because long codes make a tree's description longer. Then it lengthens other codes, the
// rarest first, so that the code is complete again. The format demands this.
func (h *huffman) limit() {
	total := 0
	for _, l := range h.sorted {
		total += l.count()
	}
	most := uint8(min(max(bits.Len(uint(total-1))-2, bits.Len(uint(len(h.sorted)-1))+1), huffMaxBits))
	whole := 1 << most
	used := 0 // share of the whole that the codes take
	for _, l := range h.sorted {
		h.length[l.value()] = min(h.length[l.value()], most)
		used += whole >> h.length[l.value()]
	}
	for i := 0; used > whole; i = (i + 1) % len(h.sorted) {
		if n := &h.length[h.sorted[i].value()]; *n < most {
			*n++
			used -= whole >> *n
		}
	}
	for i := len(h.sorted) - 1; used < whole; i-- {
		if n := &h.length[h.sorted[i].value()]; whole>>*n <= whole-used {
			used += whole >> *n
			*n--
			i++
		}
	}
}

// assign derives the codes from their lengths, 4.2.1.3: from the longest codes to the shortest, codes
// of one length in the order of their bytes.
func (h *huffman) assign() {
	var next [huffMaxBits + 2]uint64
	for _, l := range h.sorted {
		next[h.length[l.value()]]++
	}
	code, longest := uint64(0), h.longest()
	for n := longest; n > 0; n-- {
		here := next[n]
		next[n] = code
		code = (code + here) >> 1
	}
	for b, n := range h.length {
		if n > 0 {
			h.code[b] = newHuffCode(next[n], n)
			h.short[b] = uint16(next[n]<<4) | uint16(n)
			next[n]++
		}
	}
}

func (h *huffman) longest() uint8 { return slices.Max(h.length[:]) }

// bits returns the sum of the lengths of all literals' codes.
func (h *huffman) bits() (n int) {
	for _, l := range h.sorted {
		n += l.count() * int(h.length[l.value()])
	}
	return n
}

// describe appends the tree's description, 4.2.1: the weights of all bytes before the last byte that
// occurs. The weights are compressed, or stored as nibbles. It returns false if they do not compress
// and are too many for nibbles.
func (h *huffman) describe(out []byte) ([]byte, bool) {
	n := 255
	for h.length[n] == 0 {
		n--
	}
	longest := h.longest()
	for b, l := range h.length[:n] {
		h.weight[b] = 0
		if l > 0 {
			h.weight[b] = longest + 1 - l
		}
	}
	h.fse.TableLog = 6 // Maximum_Accuracy_Log, 4.2.1.2
	packed, err := fse.Compress(h.weight[:n], &h.fse)
	if err == nil && len(packed) < huffWeights && len(packed) < (n+1)/2 {
		return append(append(out, byte(len(packed))), packed...), true
	}
	if n > huffWeights {
		return nil, false
	}
	out = append(out, byte(127+n))
	h.weight[n] = 0
	for i := 0; i < n; i += 2 {
		out = append(out, h.weight[i]<<4|h.weight[i+1])
	}
	return out, true
}

// joinCodes sets joined. The high byte's code comes first, because a stream is read from its end.
func (h *huffman) joinCodes() {
	for w := range h.joined[:1<<(16-h.shift)] {
		high, low := h.code[w<<h.shift>>8], h.code[byte(w<<h.shift)]
		both := high>>8<<8>>(low.length()&63) | low>>8<<8
		h.joined[w] = both | huffCode(high.length()+low.length())
	}
}

// fourStreams appends the Jump_Table and the four streams, 3.1.1.3.1.6.
func (h *huffman) fourStreams(out, src []byte) []byte {
	jump := len(out)
	out = out[:jump+huffJump]
	part := (len(src) + 3) / 4
	room := part*huffMaxBits/8 + huffSlack
	var s [4]huffStream
	for i := range s {
		// Write each stream to a part of out of its own. They are joined below.
		from, to := i*part, min((i+1)*part, len(src))
		place := len(out) + i*room
		s[i] = h.begin(out[place:place+room], src[from:to], from%2)
	}
	for i := 0; i < 4; i += 2 {
		h.pair(&s[i], &s[i+1])
	}
	for i := range s {
		data := s[i].close(&h.code)
		out = append(out, data...)
		if i < 3 {
			binary.LittleEndian.PutUint16(out[jump+2*i:], uint16(len(data)))
		}
	}
	return out
}

// pair codes two streams with the kernels, except some bytes at the beginning of their sources. Without
// kernels it codes nothing. close codes the rest.
func (h *huffman) pair(s, t *huffStream) {
	if !h.kernel {
		return
	}
	if wide := min(len(s.src), len(t.src)) / 64; h.wide && wide > 0 {
		huffmanWideKernel(&h.short, wide, s, t)
	}
	switch count := min(len(s.src), len(t.src)) / 4; {
	case count == 0:
	case h.wordwise:
		huffmanKernel(&h.joined[0], int(h.shift), count, s, t)
	default:
		huffmanKernel(&h.code[0], -1, count, s, t)
	}
}

// oneStream appends the only stream.
func (h *huffman) oneStream(out, src []byte) []byte {
	s := huffStream{out: out[len(out):cap(out)], src: src}
	if wide := len(src) / 64; h.wide && wide > 0 {
		huffmanWideKernel(&h.short, wide, &s, nil)
	}
	return append(out, s.close(&h.code)...)
}

// begin starts a stream, 4.2.2: the codes of src from its end to its beginning. The first whole word is
// at src[skip]. If the last byte is half a word, begin codes it, so that src ends with a word.
func (h *huffman) begin(out, src []byte, skip int) huffStream {
	s := huffStream{out: out, src: src}
	if h.wordwise && (len(src)-skip)%2 != 0 {
		s.byte(&h.code)
	}
	return s
}

// huffStream writes codes, the first code to the lowest bits. The highest n bits of held are not yet
// written. The bits below are meaningless: codes are put in together with their lengths, so they need
// not be masked.
type huffStream struct {
	src  []byte // not yet coded
	out  []byte
	at   int // bytes of out that are written
	held uint64
	n    uint // at most 7 between calls
}

// byte codes the last byte of src and removes it.
func (s *huffStream) byte(codes *[256]huffCode) {
	last := len(s.src) - 1
	c := codes[s.src[last]]
	s.src = s.src[:last]
	s.held = s.held>>(c.length()&63) | uint64(c)
	s.n += uint(c.length())
	binary.LittleEndian.PutUint64(s.out[s.at:], s.held>>(64-s.n))
	s.at += int(s.n >> 3)
	s.n &= 7
}

// close codes the rest of src, writes a 1 bit as the end mark, and returns the stream.
func (s *huffStream) close(codes *[256]huffCode) []byte {
	for len(s.src) > 0 {
		s.byte(codes)
	}
	s.out[s.at] = byte(1<<s.n | s.held>>1>>(63-s.n))
	return s.out[:s.at+1]
}
