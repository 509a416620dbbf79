// While many rows are multiplied, memory has little to do. Meanwhile it brings nearer what the next layer's attention reads: the
// blocks of all sequences. Built in chapter 14.
//
// Each thread has a list of its share. In a thread that the team does without for a while it may outlive its step: a prefetch may
// address anything. Products of low-bit weights take nothing from it.
typedef struct {
    const char **blocks, *at;  // the next line, of `left` lines of its block
    long count, next, bytes, left;
} Feed;
static _Thread_local Feed feed;

static inline int is_fed(void) { return feed.left > 0; }

static inline void next_block_of_feed(void) {
    if (feed.next == feed.count) return;
    feed.at = feed.blocks[feed.next++], feed.left = feed.bytes / 64;
}

// Where the next `count` lines lie.
static void take_feed(const char **lines, long count) {
    for (long i = 0, some; i < count; i += some) {
        some = feed.left < count - i ? feed.left : count - i;
        if (!some) {  // there are no more: the last one again
            lines[i] = feed.at, some = 1;
            continue;
        }
        for (long k = 0; k < some; k++) lines[i + k] = feed.at + 64 * k;
        feed.at += 64 * some;
        if (!(feed.left -= some)) next_block_of_feed();
    }
}
