package probe

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/bpf"
)

// The verifier checks only code that can be reached, so each choice makes it check other parts.
func TestBothFormsOfBlockLoad(t *testing.T) {
	started(t, BlockOptions{}) // skips the test if the machine cannot load programs
	p := process{kernel: int32(os.Getpid()), start: 1}
	for form, build := range map[string]func() (*ebpf.CollectionSpec, error){"typed": bpf.LoadBlock, "raw": bpf.LoadBlockRaw} {
		for only := range uint32(3) {
			for _, by := range []uint32{allCgroups, byTask, byBio} {
				t.Run(fmt.Sprintf("%s/%d/%d", form, only, by), func(t *testing.T) {
					prepare := func(spec *ebpf.CollectionSpec) error {
						return errors.Join(
							p.set(spec, 0),
							spec.Variables[bpf.BlockVarOnlyDevices].Set(only),
							spec.Variables[bpf.BlockVarOnlyCgroup].Set(by),
						)
					}
					l, err := load(build, build, prepare)
					if verifier := new(ebpf.VerifierError); errors.Is(err, unix.EPERM) && errors.As(err, &verifier) {
						// The verifier rejects code with EACCES or EINVAL. EPERM is the kernel's
						// policy: the program then runs in its other form.
						t.Skipf("the kernel permits no programs of this form: %+v", verifier)
					}
					if err != nil {
						t.Fatalf("%+v", err)
					}
					l.close()
				})
			}
		}
	}
}
