package symbols

import "testing"

func TestParseMapping(t *testing.T) {
	for line, want := range map[string]Mapping{
		"7f00-7f80 r-xp 00001000 fd:00 42   /lib/a b.so": {0x7f00, 0x7f80, 0x1000, 42, "/lib/a b.so"},
		"10-20 rw-p 00000000 00:00 0":                    {0x10, 0x20, 0, 0, ""},
		"10-20 r-xp 00000000 00:00 0   [vdso]":           {0x10, 0x20, 0, 0, "[vdso]"},
	} {
		if got, ok := ParseMapping(line); !ok || got != want {
			t.Errorf("%q gave %+v", line, got)
		}
	}
	for _, line := range []string{"", "20-10 r-xp 0 00:00 0", "x-20 r-xp 0 00:00 0", "10-20 r-xp"} {
		if got, ok := ParseMapping(line); ok {
			t.Errorf("%q gave %+v", line, got)
		}
	}
}
