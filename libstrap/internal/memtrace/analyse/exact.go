// Exact sums, means and quantiles of integers.

package analyse

import (
	"math/big"
	"math/bits"
)

// exactFloat is 2^53: float64 holds all integers up to it exactly.
const exactFloat = 1 << 53

// sum is the exact sum of unsigned integers, in 128 bits.
type sum struct{ hi, lo uint64 }

func (s *sum) add(v uint64) {
	var carry uint64
	s.lo, carry = bits.Add64(s.lo, v, 0)
	s.hi += carry
}

// addTimes adds v n times.
func (s *sum) addTimes(v, n uint64) {
	hi, lo := bits.Mul64(v, n)
	s.merge(sum{hi, lo})
}

func (s *sum) merge(o sum) {
	var carry uint64
	s.lo, carry = bits.Add64(s.lo, o.lo, 0)
	s.hi += o.hi + carry
}

// over returns the float64 nearest to the sum divided by n.
func (s sum) over(n uint64) float64 {
	if s.hi == 0 && s.lo < exactFloat && n < exactFloat {
		return float64(s.lo) / float64(n)
	}
	numerator := new(big.Int).SetUint64(s.hi)
	numerator.Lsh(numerator, 64).Or(numerator, new(big.Int).SetUint64(s.lo))
	quotient, _ := new(big.Rat).SetFrac(numerator, new(big.Int).SetUint64(n)).Float64()
	return quotient
}

// seconds converts ns to s. It returns the nearest float64.
func seconds(ns uint64) float64 { return sum{lo: ns}.over(1e9) }

// middle returns the float64 nearest to the mean of two values.
func middle(a, b uint64) float64 {
	lo, hi := bits.Add64(a, b, 0)
	return sum{hi, lo}.over(2)
}

// mean is a running mean of floats with Kahan's compensation, as in pandas. Its values equal the
// grouped means of pandas to the last bit, and so do the classes of suitability, which compare means
// with thresholds.
type mean struct {
	total, lost float64
	n           int64
}

func (m *mean) add(v float64) {
	y := v - m.lost
	t := m.total + y
	m.lost = float64(t-m.total) - y
	m.total = t
	m.n++
}

func (m *mean) value() float64 {
	if m.n == 0 {
		return 0
	}
	return m.total / float64(m.n)
}

// percents are the quantiles of the documented tables.
var percents = [...]uint64{50, 90, 99}

// place returns the place of a quantile among n sorted values, by numpy's method "linear": it is
// between the value of rank lower and the next, at a share of weight from the first.
func place(n, percent uint64) (lower uint64, weight float64) {
	at := float64(n-1) * (float64(percent) / 100)
	lower = uint64(at)
	return lower, at - float64(lower)
}

// lerp interpolates like numpy, to the last bit. The conversions to float64 keep the compiler from
// fusing the products into the sums.
func lerp(a, b, weight float64) float64 {
	d := b - a
	if weight >= 0.5 {
		return b - float64(d*(1-weight))
	}
	return a + float64(d*weight)
}

// wholeQuantile returns a quantile of n integers, truncated to an integer. a and b are the values
// around its place. Below 2^53 it equals int(numpy.quantile(...)); above, it is exact.
func wholeQuantile(a, b, n, percent uint64) uint64 {
	if b < exactFloat {
		_, weight := place(n, percent)
		return uint64(lerp(float64(a), float64(b), weight))
	}
	hi, lo := bits.Mul64(b-a, rankTimes100(n, percent)%100)
	part, _ := bits.Div64(hi, lo, 100)
	return a + part
}

// rankTimes100 returns the exact place of a quantile, in hundredths of a rank.
func rankTimes100(n, percent uint64) uint64 { return (n - 1) * percent }
