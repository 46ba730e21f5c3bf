package probe

import (
	"bufio"
	"os"
	"strconv"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// deviceNumbers looks devices up by their names.
func deviceNumbers(names []string) ([]uint64, error) {
	if len(names) == 0 {
		return nil, nil
	}
	known, err := partitions("/proc/partitions")
	if err != nil {
		return nil, err
	}
	var out []uint64
	for _, name := range names {
		id, ok := known[strings.TrimPrefix(name, "/dev/")]
		if !ok {
			return nil, status.New(status.NotFound, "there is no block device %q: /proc/partitions lists them", name)
		}
		out = append(out, id)
	}
	return out, nil
}

// partitions reads a file like /proc/partitions: the numbers of devices by their names.
func partitions(path string) (map[string]uint64, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, status.Wrap(status.IO, err, "the block devices cannot be listed")
	}
	defer f.Close()
	out := map[string]uint64{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) != 4 {
			continue
		}
		major, err1 := strconv.ParseUint(words[0], 10, 32)
		minor, err2 := strconv.ParseUint(words[1], 10, 32)
		if err1 == nil && err2 == nil {
			out[words[3]] = major<<20 | minor
		}
	}
	if err := lines.Err(); err != nil {
		return nil, status.Wrap(status.IO, err, "%s cannot be read", path)
	}
	return out, nil
}
