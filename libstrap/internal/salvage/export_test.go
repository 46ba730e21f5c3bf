package salvage

// Search finds the intact packets of a stream. Each search may go through so many bytes in vain. The
// packets come with their places; read is how many bytes of the stream were read.
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
