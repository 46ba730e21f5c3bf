package session

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// layers lists the files of the package, from the entry points down. A file may use only
// declarations of files on its own line and on the lines below.
var layers = []string{
	"session.go", // opens a session, and has its methods
	"writer.go",
	"intake.go",  // small tensors wait, until a call drains them
	"enqueue.go", // splits a tensor into parts and chooses their lanes
	"inline.go staged.go streamed.go",
	"maker.go files.go",
	"sink.go",
	"staging.go pending.go notes.go",
	"ring.go",  // keeps the last steps, for dumps
	"alarm.go", // finds values that are not finite, and outliers
	"copy.go",  // copies elements, and measures what they lose
	"emission.go",
	"backlog.go order.go progress.go archive.go",
	"entry.go encoders.go",
	"feed.go segment.go",
	"counters.go lifecycle.go",
	"call.go",
	"line.go names.go tensor.go options.go",
	"priority_linux.go priority_other.go mutex_plain.go mutex_race.go",
	"mutex.go",
}

func TestFilesUseOnlyFilesBelow(t *testing.T) {
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	sources := map[string]string{}
	for _, name := range names {
		if !strings.HasSuffix(name, "_test.go") {
			sources[name] = ""
		}
	}
	for _, bad := range upward(t, layers, sources) {
		t.Error(bad)
	}
}

// upward finds uses of a file above, and a file without a layer.
func TestAnUpwardUseIsFound(t *testing.T) {
	got := upward(t, []string{"a.go", "b.go c.go"}, map[string]string{
		"a.go": "package p\ntype door struct{ room room }\nfunc (d *door) open() { d.room.enter() }\nconst key = 1",
		"b.go": "package p\ntype room struct{}\nfunc (r *room) enter() { use(key) }",
		"c.go": "package p\nfunc use(n int) { var d door; d.open() }",
		"d.go": "package p\nvar n = 0",
	})
	want := []string{"b.go uses key of a.go", "c.go uses door of a.go", "c.go uses open of a.go", "d.go has no layer"}
	if !slices.Equal(got, want) {
		t.Errorf("found %q, not %q", got, want)
	}
}

// upward returns each use of a declaration in a file above. sources maps file names to their text;
// the text "" stands for the file on disk.
func upward(t *testing.T, layers []string, sources map[string]string) (found []string) {
	t.Helper()
	level := map[string]int{}
	for i, names := range layers {
		for _, name := range strings.Fields(names) {
			level[name] = i
		}
	}
	set := token.NewFileSet()
	var files []*ast.File
	for name, source := range sources {
		if _, ok := level[name]; !ok {
			found = append(found, name+" has no layer")
		}
		var from any
		if source != "" {
			from = source
		}
		file, err := parser.ParseFile(set, name, from, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	// Imported packages are empty here. Uses of them are type errors, which this check ignores.
	info := types.Info{Uses: map[*ast.Ident]types.Object{}}
	check := types.Config{Importer: nothing{}, Error: func(error) {}}
	self, _ := check.Check("p", set, files, &info)
	for use, of := range info.Uses {
		if of.Pkg() != self || !of.Pos().IsValid() {
			continue
		}
		from, to := set.Position(use.Pos()).Filename, set.Position(of.Pos()).Filename
		if level[from] > level[to] {
			found = append(found, fmt.Sprintf("%s uses %s of %s", from, of.Name(), to))
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// nothing imports each package as an empty one.
type nothing struct{}

func (nothing) Import(path string) (*types.Package, error) {
	empty := types.NewPackage(path, path[strings.LastIndex(path, "/")+1:])
	empty.MarkComplete()
	return empty, nil
}
