package main

import "C"

// version is set by libstrap/build.sh with -ldflags -X.
var version = "0.0.0-unversioned"

var versionC = C.CString(version)

//export strapgoVersion
func strapgoVersion() *C.char { return versionC }
