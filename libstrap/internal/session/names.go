package session

import (
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// maxNames is how many bytes of names a session keeps of layers, and of requests.
const maxNames = 64 << 20

// names are what tensors name by a number.
type names struct {
	mu           sync.RWMutex
	layers       []*layer
	layerIDs     map[layerKey]uint32
	layersText   int      // bytes of their names
	requests     []string // the first has the id 1
	requestIDs   map[string]uint32
	requestsText int
}

func newNames() names {
	return names{layerIDs: map[layerKey]uint32{}, requestIDs: map[string]uint32{}}
}

type layer struct {
	model, name, path string
	packetName        string
	raw               atomic.Int32 // how many packets from the last one that was tried are raw
}

type layerKey struct{ model, name, path string }

// Layer registers a source of tensors and returns its id; the same three names
// give the same id.
func (s *Session) Layer(model, name, path string) (uint32, error) {
	for _, v := range []struct{ what, text string }{{"model", model}, {"name", name}, {"path", path}} {
		if !utf8.ValidString(v.text) {
			return 0, status.New(status.InvalidArgument, "%s %q is not UTF-8", v.what, v.text)
		}
	}
	if len(model) > MaxText {
		return 0, status.New(status.InvalidArgument, "model name of %d bytes (%.40q...): at most %d",
			len(model), model, MaxText)
	}
	if n := len(name) + len(path); n > wire.MaxName {
		return 0, status.New(status.InvalidArgument,
			"packet name of %d bytes (%.40q...): at most %d", n, name+path, wire.MaxName)
	}
	key := layerKey{model, name, path}
	s.names.mu.Lock()
	defer s.names.mu.Unlock()
	id, known := s.names.layerIDs[key]
	if !known {
		text := 2*(len(name)+len(path)) + len(model) // and as the packet's name
		if s.names.layersText+text > maxNames {
			return 0, status.New(status.NoMemory, "no more than %d bytes of names are kept for layers; "+
				"are names made anew for each tensor?", maxNames)
		}
		s.names.layersText += text
		id = uint32(len(s.names.layers))
		s.names.layers = append(s.names.layers, &layer{model: model, name: name, path: path, packetName: name + path})
		s.names.layerIDs[key] = id
		s.opts.Intake.Layers(len(s.names.layers))
	}
	return id, nil
}

func (s *Session) layer(id uint32) (*layer, error) {
	s.names.mu.RLock()
	defer s.names.mu.RUnlock()
	if int(id) >= len(s.names.layers) {
		return nil, status.New(status.InvalidArgument,
			"layer = %d was not registered; %d are", id, len(s.names.layers))
	}
	return s.names.layers[id], nil
}

// Request registers what tensors are made for and returns its id, from 1 on; the same name gives
// the same id.
func (s *Session) Request(name string) (uint32, error) {
	if name == "" || len(name) > MaxText {
		return 0, status.New(status.InvalidArgument, "a request's name of %d bytes (%.40q...): give 1 to %d",
			len(name), name, MaxText)
	}
	if !utf8.ValidString(name) {
		return 0, status.New(status.InvalidArgument, "a request's name %q is not UTF-8", name)
	}
	s.names.mu.Lock()
	defer s.names.mu.Unlock()
	id, known := s.names.requestIDs[name]
	if !known {
		if s.names.requestsText+len(name) > maxNames {
			return 0, status.New(status.NoMemory,
				"no more than %d bytes of names are kept for requests: begin another capture", maxNames)
		}
		s.names.requestsText += len(name)
		s.names.requests = append(s.names.requests, name)
		id = uint32(len(s.names.requests))
		s.names.requestIDs[name] = id
		s.opts.Intake.Requests(len(s.names.requests))
	}
	return id, nil
}

// request is the name of a registered id, "" of 0.
func (s *Session) request(id uint32) (string, error) {
	if id == 0 {
		return "", nil
	}
	s.names.mu.RLock()
	defer s.names.mu.RUnlock()
	if int(id) > len(s.names.requests) {
		return "", status.New(status.InvalidArgument,
			"request = %d was not registered; %d are", id, len(s.names.requests))
	}
	return s.names.requests[id-1], nil
}
