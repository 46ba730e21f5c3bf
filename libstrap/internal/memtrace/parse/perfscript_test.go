package parse

import (
	"strings"
	"testing"
)

func TestDocumentedLines(t *testing.T) {
	got, c := show(t, PerfScript, strings.Join([]string{
		"llama-cli 1234 [003] 100.000001: 4000 cpu/mem-loads,ldlat=30/P: 7f0000001000 ggml_vec_dot+0x1f /usr/lib/libggml.so",
		"llama-cli 1234 [003] 100.5: cpu/mem-stores/P: 7f0000001008 ggml_vec_dot [libggml.so]",
		"llama cli 12 1234 [000] 100.123456789987: 1 MEM-STORES: 7F00 malloc",
		"a 1 [0] 0.000000001: mem-loads: 0 add+10 b trailing words",
	}, "\n"), Options{})
	same(t, got,
		"100000001000 load 7f0000001000 ggml_vec_dot /usr/lib/libggml.so cpu=3 thread=1234",
		"100500000000 store 7f0000001008 ggml_vec_dot [libggml.so] cpu=3 thread=1234",
		"100123456789 store 7f00 malloc  cpu=0 thread=1234",
		"1 load 0 add b cpu=0 thread=1",
	)
	sameCounts(t, c, 4, 0, 0)
}

func TestColumnsOfPerfMemRecord(t *testing.T) {
	got, _ := show(t, PerfScript, strings.Join([]string{
		// Linux 5.19 and later: the words begin with the operation.
		"       llama-cli 18247/18249   [002] 15333.704933:       4000 cpu/mem-loads,ldlat=30/P:     7f3c5a2b1040         68100142 |OP LOAD|LVL L1 hit|SNP None|TLB L1 or L2 hit|LCK No|BLK  N/A               27     55d0c0a01a3f ggml_vec_dot_q4_0+0x1f (/usr/lib/libggml-cpu.so)         1a2b3c040",
		// Before 5.19: the words begin with the level.
		"       llama-cli 18247/18249   15333.704934:       4000      cpu/mem-stores/P:     7f3c5a2b1040          5080144 L1 hit|SNP N/A|TLB N/A|LCK N/A                0     55d0c0a01a3f ggml_vec_dot_q4_0+0x1f (/usr/lib/libggml-cpu.so)",
		// Cut words, more latencies, and an instruction pointer without a symbol.
		"       llama-cli 18247 15333.704935: cpu_core/mem-loads-aux/:     7f3c5a2b1040       3600800042 |OP LOAD|LVL Remote Any cache hit|SNP HitM|TLB L2 hit|LCK No|BLK Data Ad              310              12     7f0000401136 [unknown] ([unknown])",
		"       llama-cli 18247 15333.704936: ibs_op//:     7f3c5a2b1048         68100184 |OP STORE|LVL L1 miss|SNP None|TLB L1 hit|LCK Yes|BLK  N/A",
	}, "\n"), Options{CyclesPerNS: 2.7})
	same(t, got,
		"15333704933000 load 7f3c5a2b1040 ggml_vec_dot_q4_0 /usr/lib/libggml-cpu.so cpu=2 thread=18249 level=L1 latency=10",
		"15333704934000 store 7f3c5a2b1040 ggml_vec_dot_q4_0 /usr/lib/libggml-cpu.so thread=18249 level=L1",
		"15333704935000 load 7f3c5a2b1040 [unknown] [unknown] thread=18247 level=remote any cache latency=115",
		"15333704936000 store 7f3c5a2b1048   thread=18247 level=L1 miss",
	)
}

// The lines are the output of perf 6.1 for page faults, with different columns.
func TestColumnsOfSoftwareEvents(t *testing.T) {
	got, c := show(t, PerfScript, `
              ls 17680/17680 [000] 15333.705528:          1 page-faults:     7efe468c3a60 __x86_cacheinfo_ifunc+0x0 (/usr/lib/x86_64-linux-gnu/libc.so.6)     7efe468c3a61 init+0x0 (/usr/lib/ld.so)
              ls 17680/17680 [000] 15333.705532:          1 page-faults:     7efe469ed550 [unknown] (//anon)     7efe468c3ab6 [unknown] (/usr/lib/libc.so.6)
              ls 17680 [000] 15333.705540: page-faults:     7efe468af840
              ls 17680 [000] 15333.705541: page-faults:     7efe468af840     7efe468c3ab6
python3 19014/19014 [000] 15952.817997:          1 page-faults:     55e688b98424 [unknown] (/usr/bin/env)      1e05080021 |OP N/A|LVL N/A or N/A|SNP N/A|TLB N/A|LCK N/A|BLK  N/A               0
	ffffffff8175336a elf_load+0x28a ([kernel.kallsyms])
	ffffffff81753a0a load_elf_binary+0x66a ([kernel.kallsyms])

:-1    -1 [001] 15952.817998:          1 page-faults:     55e688b98424 [unknown] (//anon)     7efe468c3ab6 main (inlined)
`, Options{CyclesPerNS: 1})
	same(t, got,
		"15333705528000 load 7efe468c3a60 init /usr/lib/ld.so cpu=0 thread=17680",
		"15333705532000 load 7efe469ed550 [unknown] /usr/lib/libc.so.6 cpu=0 thread=17680",
		"15333705540000 load 7efe468af840   cpu=0 thread=17680",
		"15333705541000 load 7efe468af840 7efe468c3ab6  cpu=0 thread=17680",
		"15952817997000 load 55e688b98424 elf_load [kernel.kallsyms] cpu=0 thread=19014",
		"15952817998000 load 55e688b98424 main  cpu=1",
	)
	sameCounts(t, c, 6, 4, 0)
}

// Without the column of addresses, perf prints the instruction pointer in the place of the address.
// The lines are perf's own, for the same samples with and without -F +addr.
func TestSamplesPrintedWithoutTheAddress(t *testing.T) {
	for fields, text := range map[string]string{
		"the default":         "               w  1914 12736.801084:        100 page-faults:      560c9823e143 touch+0xa (/tmp/w)",
		"in the kernel":       "               w  1762 12728.858665:       4000 cpu/mem-loads,ldlat=30/P:  ffffffff815ec2f4 do_anonymous_page+0x764 ([kernel.kallsyms])",
		"time,event,ip,sym":   "               w  1914/1914  12736.801336: page-faults:      560c9823e143 touch (/tmp/w)",
		"+flags":              "               f 14488 26883.340897:          1 page-faults:                          ffffffff81b75d98 _copy_to_user+0x28 ([kernel.kallsyms])",
		"+flags, user":        "               n 23608 27339.773829:          1 page-faults:                              56200a54016e touch+0x0 (/tmp/n)",
		"+flags, older perf":  "               n 23608 27339.773829:          1 page-faults:                            56200a54016e touch+0x0 (/tmp/n)",
		"+flags,+phys_addr":   "               f 14488 26883.340897:          1 page-faults:                          ffffffff81b75d98 _copy_to_user+0x28 ([kernel.kallsyms])               0",
		"flags, -g":           "f 13995 26781.557166:          1 page-faults:                         \n\tffffffff817554ea elf_load+0x28a ([kernel.kallsyms])\n",
		"time,event,ip,flags": "               f 14488 26883.340897: page-faults:                          ffffffff81b75d98",
		"+phys_addr":          "               f 14488 26883.340897:          1 page-faults:  ffffffff81b75d98 _copy_to_user+0x28 ([kernel.kallsyms])               0",
		"+weight":             "               n 23608 27339.773829:          1 page-faults:                0     56200a54016e touch+0x0 (/tmp/n)",
		"+ins_lat, +weight":   "               f 14488 26883.340897:          1 page-faults:                0               0 ffffffff81b75d98 _copy_to_user+0x28 ([kernel.kallsyms])",
		"+flags,+weight":      "               f 14488 26883.340897:          1 page-faults:                                        0 ffffffff81b75d98 _copy_to_user+0x28 ([kernel.kallsyms])",
		"+data_src":           "               f 14488 26883.340897:          1 page-faults:       1e05080021 |OP N/A|LVL N/A or N/A|SNP N/A|TLB N/A|LCK N/A|BLK  N/A ffffffff81b75d98 _copy_to_user+0x28 ([kernel.kallsyms])",
		"-g":                  "w  1926 12739.893965:        300 page-faults: \n\t            1143 touch+0xa (/tmp/w)\n\t           2724a main+0x7a (/tmp/w)\n",
		"data_src, ip":        "llama-cli  46572 [002] 544966.882390:          1 l1d-miss:         88000182 |OP LOAD|LVL L1 miss|SNP N/A|TLB Walker hit|LCK No|BLK  N/A ffffa7c22b4b2a00 [unknown] ([kernel.kallsyms])",
		"data_src, ip (5.18)": "llama-cli  46572 [002] 544966.882391:          1 l1d-miss:         88000182 L1 miss|SNP N/A|TLB Walker hit|LCK No|BLK  N/A ffffa7c22b4b2a00 [unknown] ([kernel.kallsyms])",
	} {
		for _, format := range []Format{PerfScript, PageFaults} {
			if format == PageFaults && !strings.Contains(text, "fault") {
				continue
			}
			if got, c := show(t, format, text, Options{}); len(got) != 0 || c.Unaddressed != 1 || c.Malformed != 0 {
				t.Errorf("%s, %s: %q, %+v", format, fields, got, c)
			}
		}
	}
	got, c := show(t, PerfScript, "               w  1914 12736.801084:        100 page-faults:     7f78c9528010 [unknown] (//anon)     560c9823e143 touch+0xa (/tmp/w)", Options{})
	same(t, got, "12736801084000 load 7f78c9528010 touch /tmp/w thread=1914")
	if c.Unaddressed != 0 {
		t.Errorf("%+v", c)
	}
}

// The same samples, printed with the address and other fields.
func TestFieldsBesideTheAddress(t *testing.T) {
	for fields, text := range map[string]string{
		"addr,flags,weight,phys_addr": "               f 14488 26883.340897:          1 page-faults:                             7fff62be9629 [unknown] ([stack])               0 ffffffff81b75d98 _copy_to_user+0x28 ([kernel.kallsyms])               0",
		"addr,weight":                 "               f 14488 26883.340897:          1 page-faults:     7fff62be9629 [unknown] ([stack])               0 ffffffff81b75d98 _copy_to_user+0x28 ([kernel.kallsyms])",
	} {
		got, c := show(t, PerfScript, text, Options{})
		if want := "26883340897000 load 7fff62be9629 _copy_to_user [kernel.kallsyms] thread=14488"; len(got) != 1 || got[0] != want || c.Unaddressed != 0 {
			t.Errorf("%s: %q, %+v", fields, got, c)
		}
	}
	got, _ := show(t, PerfScript, "               f 14488 26883.340897: page-faults:                             7fff62be9629 [unknown]", Options{})
	same(t, got, "26883340897000 load 7fff62be9629 [unknown]  thread=14488")
}

// A weight or a physical address alone stands in the place of an address, and cannot be told from
// one. docs/TROUBLESHOOTING.md says so.
func TestNumbersThatLookLikeAnAddress(t *testing.T) {
	got, _ := show(t, PerfScript, `
               f 14488 26883.340897: page-faults:                0
               f 14488 26883.340898:       4000 cpu/mem-loads,ldlat=30/P:               34     56200a54016e touch+0x0 (/tmp/n)
f 14488 26883.340899:          1 page-faults:                0
	    56200a54016e touch+0x0 (/tmp/n)
`, Options{})
	same(t, got,
		"26883340897000 load 0   thread=14488",
		"26883340898000 load 34 touch /tmp/n thread=14488",
		"26883340899000 load 0 touch /tmp/n thread=14488",
	)
}

// The lines are perf's own, with -d and -F +addr, for events that are no accesses.
func TestSamplesOfOtherEvents(t *testing.T) {
	got, c := show(t, PerfScript, strings.Join([]string{
		"               w  1798 12730.229755:    3000000 cpu-clock:                0 ffffffff821f5127 exc_page_fault+0xd7 ([kernel.kallsyms])",
		"w  3707 12891.766625:    3000000 cpu-clock:u:                0",
		"\tffffffff8168e1d1 __lruvec_stat_mod_folio+0x51 ([kernel.kallsyms])",
		"w 1 [000] 1.0: 3000000 cpu-clock: 558da517a160 spin+0xd (/tmp/w)",
		"w 1 [000] 1.0: cycles:P: 558da517a160 spin+0xd (/tmp/w)",
		"w 1 [000] 1.0: 7 dummy:                0 558da517a160 spin+0xd (/tmp/w)",
		// These are accesses.
		"w 1 [000] 1.0: 1 cpu/mem-loads/P:                0 558da517a160 spin+0xd (/tmp/w)",
		"w 1 [000] 1.0: 1 ibs_op//:                0         1a29081042 |OP LOAD|LVL RAM hit|SNP N/A|TLB L2 miss|LCK N/A|BLK  N/A             180     558da517a160 spin+0xd (/tmp/w)",
		"w 1 [000] 1.0: 100000 cycles:P:     7ffdf1391b0c         1a29081042 |OP LOAD|LVL RAM hit|SNP N/A|TLB L2 miss|LCK N/A|BLK  N/A             180     558da517a160 spin+0xd (/tmp/w)",
		"               n 23608 27339.773829:          1 page-faults:                0 [unknown] ([unknown])     56200a54016e touch+0x0 (/tmp/n)",
		"               n 23608 27339.773829:          1 page-faults:                0 [unknown] ([unknown])      1e05080021 |OP N/A|LVL N/A or N/A|SNP N/A|TLB N/A|LCK N/A|BLK  N/A     56200a54016e touch+0x0 (/tmp/n)",
	}, "\n"), Options{})
	same(t, got,
		"1000000000 load 0 spin /tmp/w cpu=0 thread=1",
		"1000000000 load 0 spin /tmp/w cpu=0 thread=1 level=RAM",
		"1000000000 load 7ffdf1391b0c spin /tmp/w cpu=0 thread=1 level=RAM",
		"27339773829000 load 0 touch /tmp/n thread=23608",
		"27339773829000 load 0 touch /tmp/n thread=23608",
	)
	sameCounts(t, c, 5, 1, 0)
	if c.Unaddressed != 5 {
		t.Errorf("%+v", c)
	}
}

// With -g, the symbol of the address stands on the line of the sample, and the symbol of the code on
// the next line. The lines are perf's own, except for the data source of the last sample.
func TestCallChainsBehindAnAddressWithASymbol(t *testing.T) {
	got, c := show(t, PerfScript, `
w  1926 12739.890563:        300 page-faults:     7f4fae785010 [unknown] (//anon)
	            1143 touch+0xa (/tmp/w)
	           2724a __libc_start_call_main+0x7a (/usr/lib/libc.so.6)

w  1926 12739.893382:        300 page-faults:     55c996ec35c0 table+0x10 (/tmp/w)
	            1160 spin+0x10 (/tmp/w)

w  1926 12739.893383:        300 cpu/mem-stores/P:     55c996ec35c0 table+0x10 (/tmp/w)         5080144 |OP STORE|LVL L1 hit|SNP N/A|TLB N/A|LCK N/A|BLK  N/A               7
	            1170 fill+0x2 (/tmp/w)

`, Options{CyclesPerNS: 1})
	same(t, got,
		"12739890563000 load 7f4fae785010 touch /tmp/w thread=1926",
		"12739893382000 load 55c996ec35c0 spin /tmp/w thread=1926",
		"12739893383000 store 55c996ec35c0 fill /tmp/w thread=1926 level=L1 latency=7",
	)
	sameCounts(t, c, 3, 8, 0)
}

// The lines are those of perf 6 for one fault of a program named "my [0] p", with different fields
// (-F), with call chains and with --phys-data. The program's file has the same name.
func TestFieldsOfToday(t *testing.T) {
	const (
		program = "        my [0] p 22717"
		data    = " __progname+0x0 (/tmp/my [0] p)"
		ip      = "ffffffff8175336a elf_load+0x28a ([kernel.kallsyms])"
		words   = "      1e05080021 |OP N/A|LVL N/A or N/A|SNP N/A|TLB N/A|LCK N/A|BLK  N/A"
		found   = "24140374480000 load 55c996ec35c0 elf_load [kernel.kallsyms]"
	)
	for fields, want := range map[string][2]string{
		"comm,pid,tid,cpu,time,event,addr,data_src,weight,ip,sym,symoff,dso": {
			program + "/22717 [000] 24140.374480: page-faults:     55c996ec35c0" + data + words + "               0 " + ip,
			found + " cpu=0 thread=22717"},
		"comm,pid,tid,cpu,misc,time,event,addr,ip,sym,dso": {
			program + "/22717 [000] K     24140.374480: page-faults:     55c996ec35c0" + data + " " + ip,
			found + " cpu=0 thread=22717"},
		"comm,tid,misc,time,period,event,addr,ip,sym,dso": {
			program + " K     24140.374480:          1 page-faults:     55c996ec35c0" + data + " " + ip,
			found + " thread=22717"},
		"tid,cpu,time,event,addr,ip,sym,dso": {
			"22717 [000] 24140.374480: page-faults:     55c996ec35c0 __progname (/tmp/my [0] p) ffffffff8175336a elf_load ([kernel.kallsyms])",
			found + " cpu=0 thread=22717"},
		"comm,tid,cpu,time,event,addr,ip,sym,dso,flags": {
			program + " [000] 24140.374480: page-faults:                             55c996ec35c0" + data + " " + ip,
			found + " cpu=0 thread=22717"},
		"comm,tid,cpu,time,event,addr,ip,sym,dso,ins_lat": {
			program + " [000] 24140.374480: page-faults:     55c996ec35c0" + data + "               0 " + ip,
			found + " cpu=0 thread=22717"},
		"comm,tid,cpu,time,event,addr,sym,dso": {
			program + " [000] 24140.374480: page-faults:     55c996ec35c0" + data,
			"24140374480000 load 55c996ec35c0 __progname /tmp/my [0] p cpu=0 thread=22717"},
		"comm,tid,cpu,time,event,addr (--ns)": {
			program + " [000] 24140.374480123: page-faults:     55c996ec35c0",
			"24140374480123 load 55c996ec35c0   cpu=0 thread=22717"},
		"-g, ...,weight,ip,sym,symoff,dso,phys_addr,data_page_size": {
			"my [0] p 22717/22717 [000] 24140.374480: page-faults:     55c996ec35c0" + data + words + "               0\n" +
				"\t" + ip + "\n\t    7f7c18ef2ad7 [unknown] ([unknown])\n               0 4K\n       1a2b3c040 N/A",
			found + " cpu=0 thread=22717"},
	} {
		got, c := show(t, PerfScript, want[0]+"\n", Options{})
		if len(got) != 1 || got[0] != want[1] || c.Malformed != 0 {
			t.Errorf("-F %s: %q, %d malformed\nnot %s", fields, got, c.Malformed, want[1])
		}
	}
}

// The data sources are those of Intel's hybrid cores, AMD's IBS and Arm's SPE.
func TestDataSourcesInWords(t *testing.T) {
	got, c := show(t, PerfScript, strings.Join([]string{
		// Three latencies: of the access, of the instruction, and of the retirement.
		"llama-cli  46572 [002] 544966.882384:      10000         cpu_core/MEM_UOPS_RETIRED.LOAD_LATENCY/: 7ffdf1391b0c      10268100142 |OP LOAD|LVL L1 hit|SNP None|TLB L1 or L2 hit|LCK No|BLK  N/A              54               7               0     7fad7c47425d [unknown] (/usr/lib64/libm.so.6)",
		"llama-cli  46572 [002] 544966.882385:      10000 cpu/mem-loads,ldlat=30/P:     7ffdf1391b0c      10668100842 |OP LOAD|LVL L3 or L3 hit|SNP None|TLB L1 or L2 hit|LCK No|BLK  N/A               47     7fad7c47425d f+0x1 (/x)",
		"llama-cli  46572 [002] 544966.882386:      10000 cpu/mem-loads,ldlat=30/P:     7ffdf1391b0c      11868100242 |OP LOAD|LVL LFB/MAB or LFB/MAB hit|SNP None|TLB L1 or L2 hit|LCK No|BLK  N/A      57     7fad7c47425d f+0x1 (/x)",
		"llama-cli  46572 [002] 544966.882387:     100000 ibs_op//p: ffff9c3f4bd8a800         1a29081042 |OP LOAD|LVL RAM hit|SNP N/A|TLB L2 miss|LCK N/A|BLK  N/A             180 ffffffff82429168 memcpy+0x8 ([kernel.kallsyms])",
		"llama-cli  46572 [002] 544966.882388:     100000 ibs_op//p:     7ffdf1391b0c           229080144 |OP STORE|LVL L1 hit|SNP N/A|TLB L1 hit|LCK N/A|BLK  N/A               0     7fad7c47425d f+0x1 (/x)",
		// The words of the latest perf: extended operations, and more words behind BLK.
		"llama-cli  46572 [002] 544966.882389:          1 memory:     aaaac17c3e88  444000288100144 |OP STORE SIMD|LVL L1 hit|SNP None|TLB Walker hit|LCK No|BLK  N/A|AFF PRED SG     aaaac17c3e88 f+0x1 (/x)",
	}, "\n"), Options{CyclesPerNS: 2})
	same(t, got,
		"544966882384000 load 7ffdf1391b0c [unknown] /usr/lib64/libm.so.6 cpu=2 thread=46572 level=L1 latency=27",
		"544966882385000 load 7ffdf1391b0c f /x cpu=2 thread=46572 level=L3 latency=24",
		"544966882386000 load 7ffdf1391b0c f /x cpu=2 thread=46572 level=LFB latency=29",
		"544966882387000 load ffff9c3f4bd8a800 memcpy [kernel.kallsyms] cpu=2 thread=46572 level=RAM latency=90",
		"544966882388000 store 7ffdf1391b0c f /x cpu=2 thread=46572 level=L1",
		"544966882389000 store aaaac17c3e88 f /x cpu=2 thread=46572 level=L1",
	)
	sameCounts(t, c, 6, 0, 0)
}

func TestCommandsOfAnyName(t *testing.T) {
	for _, comm := range []string{
		"kworker/u8:2-ev", "[kworker/0:1]", "Chrome ChildIOT", "a [001] b", "web (1)", ":1234", "swapper", "x: y", "a-1", "1 2", "ü", "-1",
	} {
		got, c := show(t, PerfScript, comm+"  4242 [003] 1.5: mem-stores: 7f00 f+0x1 (/x)", Options{})
		same(t, got, "1500000000 store 7f00 f /x cpu=3 thread=4242")
		sameCounts(t, c, 1, 0, 0)
	}
}

func TestSymbols(t *testing.T) {
	for text, want := range map[string][2]string{
		"":                                     {"", ""},
		"main":                                 {"main", ""},
		"main+0x1f /x.so":                      {"main", "/x.so"},
		"main (/x.so)":                         {"main", "/x.so"},
		"f(int, char)+0x1f (/x.so)":            {"f(int, char)", "/x.so"},
		"f(int, char)+0x1f /x.so":              {"f(int, char)", "/x.so"},
		"operator+(A const&, B)+0xa (/x.so)":   {"operator+(A const&, B)", "/x.so"},
		"(anonymous namespace)::f()+0x1 (/x)":  {"(anonymous namespace)::f()", "/x"},
		"(anonymous namespace)::f()":           {"(anonymous", "namespace)::f()"}, // the end of the symbol cannot be seen
		"a::operator()(int) const (/x)":        {"a::operator()(int) const", "/x"},
		"main+0x0 (/tmp/My App (1)/x.so)":      {"main", "/tmp/My App (1)/x.so"},
		"main (/x.so (deleted))":               {"main", "/x.so (deleted)"},
		"main (/x.so)     1a2b3c040 4K N/A":    {"main", "/x.so"},
		"add+0x1 (/x)":                         {"add", "/x"},
		"add (/x)":                             {"add", "/x"},
		"             add dead+0x1 (/x)":       {"dead", "/x"},
		"    7f0000001000 dead (/x)":           {"dead", "/x"},
		"401136 dead (/x)":                     {"dead", "/x"},
		"ffffffff8175336a (/x)":                {"ffffffff8175336a", "/x"},
		"data (/anon)     7f0000001000 f (/x)": {"f", "/x"},
		"data (/anon)     7f0000001000 (/x)":   {"7f0000001000", "/x"},
		"f(int) x.so":                          {"f(int)", "x.so"},
	} {
		var c code
		codeOf([]byte(" "+text), &c)
		if string(c.symbol) != want[0] || string(c.dso) != want[1] {
			t.Errorf("%q: %q in %q, want %q in %q", text, c.symbol, c.dso, want[0], want[1])
		}
	}
}

func TestLinesThatAreNoSamples(t *testing.T) {
	got, c := show(t, PerfScript, strings.Join([]string{
		"# ========",
		"  # captured on    : Sat Nov 21 08:22:12 2026",
		"",
		" \t",
		"python3 19014/19014 [000] 15952.817997: PERF_RECORD_MMAP2 18247/18247: [0x55d0c0a00000(0x1000) @ 0 fe:00 1 2]: r-xp /usr/bin/env",
		"python3 19014 15952.817998: PERF_RECORD_EXIT(17680:17680):(17678:17678)",
		"ibs 1 [000] 1.0: ibs_op//:        0       1e05080021 |OP N/A|LVL N/A|SNP N/A|TLB N/A|LCK N/A|BLK  N/A   0  401136 main+0x1 (/x)",
		"\tffffffff8175336a elf_load+0x28a ([kernel.kallsyms])",
	}, "\n"), Options{})
	same(t, got)
	sameCounts(t, c, 0, 8, 0)
}

func TestMalformedLines(t *testing.T) {
	bad := []string{
		"garbage",
		"comm 1 [000] 1.0 mem-loads: ff main", // no colon behind the time
		"comm 1 [000] 1: mem-loads: ff main",  // no fraction
		"comm 1 [000] 1.0:mem-loads: ff main",
		"comm 1 [000] 1.0: mem-loads: 0xff main",
		"comm 1 [000] 1.0: mem-loads: 1ffffffffffffffff main", // 65 bits
		"comm 1 [000] 1.0: mem-loads",
		"comm 1 [000] 9223372036.854775808: mem-loads: ff main", // 2^63 ns
		"comm 1 [000] 1.0: sched:sched_switch: prev_comm=x",
		"comm [000] 1.0: mem-loads: ff main",
		"comm 1 [0x0] 1.0: mem-loads: ff main",
	}
	got, c := show(t, PerfScript, strings.Join(bad, "\n")+"\ncomm 1 [000] 9223372036.854775807: mem-loads: ffffffffffffffff main\n", Options{})
	same(t, got, "9223372036854775807 load ffffffffffffffff main  cpu=0 thread=1")
	sameCounts(t, c, 1, 0, int64(len(bad)))
	for i, s := range c.Samples {
		if s.Line != int64(i+1) || s.Text != bad[i] {
			t.Errorf("sample %d: line %d, %q", i, s.Line, s.Text)
		}
	}
}

func TestBytesOfAnyKind(t *testing.T) {
	got, c := show(t, PerfScript, "a\x00b 1 [0] 1.0: x: ff f\x00g (/\xff\xfex)\r\n"+"c 1 [0] 1.0: x: ff \xc3\xa9\xff h\r\n\xff\x00\r\n", Options{})
	same(t, got,
		"1000000000 load ff f\x00g /\uFFFDx cpu=0 thread=1",
		"1000000000 load ff é\uFFFD h cpu=0 thread=1",
	)
	sameCounts(t, c, 2, 0, 1)
	if c.Samples[0].Text != "\uFFFD\x00" {
		t.Errorf("sample %q", c.Samples[0].Text)
	}
}

func TestDataSources(t *testing.T) {
	for source, want := range map[uint64]string{
		0x68100142:                    "L1", // Intel, only the bits of the level
		0x68100242:                    "LFB",
		0x68100000 | (0x02|0x80)<<5:   "RAM",
		0x68100000 | (0x02|0x100)<<5:  "remote RAM",
		0x68100000 | (0x02|0x400)<<5:  "remote cache",
		0x68100000 | (0x02|0x1000)<<5: "I/O",
		0x68100000 | (0x04|0x08)<<5:   "L1 miss",
		0x1e05080021:                  "", // not available
		0xd<<33 | 0x02<<5:             "RAM",
		1<<37 | 0xd<<33 | 0x02<<5:     "remote RAM",
		0xe << 33:                     "PMEM",
		0x3<<33 | (0x04|0x40)<<5:      "L3 miss",
		0xc<<33 | (0x02|0x10)<<5:      "LFB",
		0:                             "",
		^uint64(0):                    "L1", // all bits: hit and miss of many
	} {
		got := ""
		if code := levelOf(source); code != noLevel {
			got = levelNames[code]
		}
		if got != want {
			t.Errorf("%#x: level %q, want %q", source, got, want)
		}
	}
}
