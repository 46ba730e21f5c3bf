package probe

var collectors = map[string]func(options []byte) (Collector, error){
	"block":    starter("block", StartBlock),
	"system":   starter("system", StartSystem),
	"syscalls": starter("syscalls", StartSyscalls),
	"off_cpu":  starter("off_cpu", StartOffCPU),
}
