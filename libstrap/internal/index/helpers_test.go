// Resumes an index in one call, for tests.

package index

import (
	"cmp"
	"io"
)

// Resume calls Find and then Found.Resume.
func Resume(path string, stream io.ReaderAt, cut int64) (*Writer, Kept, error) {
	found, err := Find(path, stream, cut)
	if err != nil {
		return nil, Kept{}, err
	}
	if found.Lost != nil {
		return nil, Kept{}, found.Lost
	}
	w, err := found.Resume(cmp.Or(found.CaptureID, captureID))
	return w, found.Kept, err
}
