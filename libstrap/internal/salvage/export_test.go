// Opens the search for packets to tests of other packages.

package salvage

// Search finds the intact packets of a stream, with their places. allowance bounds how many bytes
// each search may process for candidates that are no packets. read is how many bytes of the stream
// were read in all.
func Search(path string, allowance int64) (packets []found, read int64, err error) {
	s, err := open(path, Options{})
	if err != nil {
		return nil, 0, err
	}
	defer s.f.Close()
	s.allowance = allowance
	packets, err = s.locate()
	return packets, s.read, err
}
