// Newer headers of libstdc++ ask glibc whether the process has one thread, and then save atomic operations. glibc 2.28,
// which the wheel supports, has no such variable. This one says no, and holds only for the binary that links it.
extern "C" {
char __libc_single_threaded = 0;
}
