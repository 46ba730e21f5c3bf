// Begins with the set of loops that STRAP_LEVEL names, in builds with the tag strap_level.

//go:build strap_level

package codec

import "os"

// init makes a library that is built with this tag begin with the level in STRAP_LEVEL. It is for the
// tests in Python; see tests/integration/test_levels.py.
func init() { UseLevel(os.Getenv("STRAP_LEVEL")) }
