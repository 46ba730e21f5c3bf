// The layers and requests that tensors refer to by number.

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

// names holds the layers and requests that tensors refer to by number.
type names struct {
	mu           sync.RWMutex
	layers       []*layer
	layerIDs     map[layerKey]uint32
	layersText   int      // bytes of their names
	requests     []string // the first has the id 1
	requestIDs   map[string]uint32
	requestsText int
}

func newNames() *names {
	return &names{layerIDs: map[layerKey]uint32{}, requestIDs: map[string]uint32{}}
}

// layer is a source of tensors.
type layer struct {
	model, name, path string
	packetName        string
	raw               atomic.Int32 // how many of the next packets are stored raw; see tried
}

// tryEvery is how many packets of a layer that stays raw have one of them compressed, to see whether
// that still makes it no smaller.
const tryEvery = 32

// tried records whether compressing a packet left it raw.
func (l *layer) tried(raw bool) {
	if raw {
		l.raw.Store(tryEvery)
	} else {
		l.raw.Store(0)
	}
}

// takeRawTurn reports whether to store this packet raw. Each call uses up one turn.
func (l *layer) takeRawTurn() bool { return l.raw.Add(-1) > 0 }

type layerKey struct{ model, name, path string }

// addLayer registers a source of tensors and returns its id. The same three names give the same
// id.
func (n *names) addLayer(model, name, path string) (uint32, error) {
	for _, v := range []struct{ what, text string }{{"model", model}, {"name", name}, {"path", path}} {
		if !utf8.ValidString(v.text) {
			return 0, status.New(status.InvalidArgument, "%s %q is not UTF-8", v.what, v.text)
		}
	}
	if len(model) > MaxText {
		return 0, status.New(status.InvalidArgument, "model name of %d bytes (%.40q...): at most %d",
			len(model), model, MaxText)
	}
	if size := len(name) + len(path); size > wire.MaxName {
		return 0, status.New(status.InvalidArgument,
			"packet name of %d bytes (%.40q...): at most %d", size, name+path, wire.MaxName)
	}
	key := layerKey{model, name, path}
	n.mu.Lock()
	defer n.mu.Unlock()
	id, known := n.layerIDs[key]
	if !known {
		text := 2*(len(name)+len(path)) + len(model) // and as the packet's name
		if n.layersText+text > maxNames {
			return 0, status.New(status.NoMemory, "no more than %d bytes of names are kept for layers; "+
				"are names made anew for each tensor?", maxNames)
		}
		n.layersText += text
		id = uint32(len(n.layers))
		n.layers = append(n.layers, &layer{model: model, name: name, path: path, packetName: name + path})
		n.layerIDs[key] = id
	}
	return id, nil
}

// origin is where a tensor comes from.
type origin struct {
	layer   *layer
	request string // "": none
}

// text returns the bytes of the names.
func (o *origin) text() int {
	return len(o.layer.model) + len(o.layer.name) + len(o.layer.path) + len(o.request)
}

// find returns the layer and the request of registered ids. The request 0 is none.
func (n *names) find(layer, request uint32) (o origin, err error) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if int(layer) >= len(n.layers) {
		return o, status.New(status.InvalidArgument,
			"layer = %d was not registered; %d are", layer, len(n.layers))
	}
	if int(request) > len(n.requests) {
		return o, status.New(status.InvalidArgument,
			"request = %d was not registered; %d are", request, len(n.requests))
	}
	o.layer = n.layers[layer]
	if request > 0 {
		o.request = n.requests[request-1]
	}
	return o, nil
}

// addRequest registers a request and returns its id, from 1 on. The same name gives the same id.
func (n *names) addRequest(name string) (uint32, error) {
	if name == "" || len(name) > MaxText {
		return 0, status.New(status.InvalidArgument, "a request's name of %d bytes (%.40q...): give 1 to %d",
			len(name), name, MaxText)
	}
	if !utf8.ValidString(name) {
		return 0, status.New(status.InvalidArgument, "a request's name %q is not UTF-8", name)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	id, known := n.requestIDs[name]
	if !known {
		if n.requestsText+len(name) > maxNames {
			return 0, status.New(status.NoMemory,
				"no more than %d bytes of names are kept for requests: begin another capture", maxNames)
		}
		n.requestsText += len(name)
		n.requests = append(n.requests, name)
		id = uint32(len(n.requests))
		n.requestIDs[name] = id
	}
	return id, nil
}
