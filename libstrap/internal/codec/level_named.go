//go:build strap_level

package codec

import "os"

// A library that is built with this tag begins with the level that the environment names. It is
// for tests in another language; see tests/integration/test_levels.py.
func init() { UseLevel(os.Getenv("STRAP_LEVEL")) }
