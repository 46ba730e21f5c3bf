// The layers and requests that tensors refer to by number.

package session

import (
	"math"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// maxNames is how many bytes of names a session keeps of layers, and of requests.
const maxNames = 64 << 20

// requestCost is what the name of a request counts beside its bytes: its places in a map and a slice.
const requestCost = 128

// names holds the layers and requests that tensors refer to by number.
type names struct {
	mu         sync.RWMutex
	layers     []*layer
	layerIDs   map[layerKey]uint32
	layersText int // bytes of their names

	// A server never stops naming requests, so the oldest names give way: when the young ones are as
	// many as may be, they become the old ones, and those before are forgotten. The intake takes
	// tensors of the young ones alone.
	young, old requests
	// waited is how many tensors the intake had taken when it stopped taking those of the old ones.
	// These may be forgotten when so many have left it.
	waited uint64
}

func newNames() *names {
	return &names{layerIDs: map[layerKey]uint32{}, young: newRequests(1), old: newRequests(1)}
}

// requests are names of requests that were registered behind each other.
type requests struct {
	first uint32 // the id of the first one
	names []string
	ids   map[string]uint32
	cost  int // bytes, with requestCost for each
}

func newRequests(first uint32) requests { return requests{first: first, ids: map[string]uint32{}} }

// name returns the name with an id, if these are the requests that have it.
func (r *requests) name(id uint32) (string, bool) {
	if id < r.first || id-r.first >= uint32(len(r.names)) {
		return "", false
	}
	return r.names[id-r.first], true
}

// next is the id of the next one; 0: all were given.
func (r *requests) next() uint32 { return r.first + uint32(len(r.names)) }

// isFull reports whether a name makes these more than half of what a session keeps.
func (r *requests) isFull(name string) bool { return r.cost+len(name)+requestCost > maxNames/2 }

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
	o.layer = n.layers[layer]
	if request == 0 {
		return o, nil
	}
	var known bool
	if o.request, known = n.young.name(request); known {
		return o, nil
	}
	if o.request, known = n.old.name(request); known {
		return o, nil
	}
	if last := n.young.next() - 1; request > last {
		return o, status.New(status.InvalidArgument, "request = %d was not registered; %d are", request, last)
	}
	return o, status.New(status.InvalidArgument,
		"request = %d is forgotten: the newest %d are kept; register its name again",
		request, len(n.old.names)+len(n.young.names))
}

// added is what addRequest has done.
type added struct {
	id, least uint32 // the request, and the first one of the young ones
	turned    bool   // whether the young ones have become old: the caller calls setWaited
}

// addRequest registers a request. Ids begin with 1. The same name gives the same id while it is among
// the young ones. passed is how many tensors have left the intake.
func (n *names) addRequest(name string, passed uint64) (a added, err error) {
	if name == "" || len(name) > MaxText {
		return a, status.New(status.InvalidArgument, "a request's name of %d bytes (%.40q...): give 1 to %d",
			len(name), name, MaxText)
	}
	if !utf8.ValidString(name) {
		return a, status.New(status.InvalidArgument, "a request's name %q is not UTF-8", name)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if id, known := n.young.ids[name]; known {
		return added{id: id, least: n.young.first}, nil
	}
	if n.young.isFull(name) {
		if passed < n.waited {
			return a, status.New(status.NoMemory,
				"the names of waiting tensors' requests take all of %d bytes: flush the session first", maxNames)
		}
		n.old, n.young = n.young, newRequests(n.young.next())
		n.waited, a.turned = math.MaxUint64, true
	}
	if a.id, a.least = n.young.next(), n.young.first; a.id == 0 {
		return a, status.New(status.NoMemory, "all 2^32 - 1 ids of requests are taken: begin another capture")
	}
	n.young.names = append(n.young.names, name)
	n.young.ids[name] = a.id
	n.young.cost += len(name) + requestCost
	return a, nil
}

// setWaited is called when the intake has stopped taking tensors of the requests that have become old.
func (n *names) setWaited(tensors uint64) {
	n.mu.Lock()
	n.waited = tensors
	n.mu.Unlock()
}
