// Newer libstdc++ headers ask glibc whether the process has one thread, to save atomic operations. glibc 2.28, which
// the wheel promises to run under, does not say; this answer, no, is for the binary alone that it is linked into.
extern "C" {
char __libc_single_threaded = 0;
}
