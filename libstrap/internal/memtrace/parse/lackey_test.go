package parse

import "testing"

// lackeyText has the beginning and the end of an output of Valgrind 3.19, and malformed lines.
const lackeyText = `==19004== Lackey, an example Valgrind tool
==19004==` + " " + `
I  0401ab70,3
I  0401ab73,5
 S 1fff000678,8
 L 1fff000678,4
 M 0402E018,8

 L nothing
 L ff
 L ff,
 X ff,8
 L ff,8 more
 L ffffffffffffffff,2
 L ff,0
program output
--19004-- warning: x
SB 04023590
 L ffffffffffffffff,1
`

func TestLackey(t *testing.T) {
	got, c := show(t, Lackey, lackeyText, Options{})
	same(t, got,
		"0 store 1fff000678   length=8",
		"1 load 1fff000678   length=4",
		"2 load 402e018   length=8",
		"3 store 402e018   length=8",
		"4 load ffffffffffffffff   length=1",
	)
	sameCounts(t, c, 5, 7, 8)
}

func TestLackeyInstructions(t *testing.T) {
	got, c := show(t, Lackey, lackeyText, Options{Instructions: true, Phases: []Phase{{"prefill", 1, 3}}})
	same(t, got[:4],
		"0 load 401ab70 [instruction]  length=3",
		"1 load 401ab73 [instruction]  length=5 phase=prefill",
		"2 store 1fff000678   length=8 phase=prefill",
		"3 load 1fff000678   length=4",
	)
	sameCounts(t, c, 7, 5, 8)
}
