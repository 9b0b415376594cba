//! `husk-answers MIB MORE`: for the guest of a benchmark. Writes to MIB mebibytes of memory and prints `ready;`. Then it
//! answers single bytes from its input: `?` with `!`, and `+` with `=` once it has written to MORE mebibytes more.
//!
//! It keeps its memory and sleeps in between. A byte that it does not know has no answer.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, Write};

fn main() -> Result<()> {
    let sizes: Vec<usize> = std::env::args()
        .skip(1)
        .map(|word| word.parse().with_context(|| format!("{word:?} is no number")))
        .collect::<Result<_>>()?;
    let [first, more] = sizes[..] else {
        bail!("usage: husk-answers MIB MORE");
    };
    let first = std::hint::black_box(written(first));
    let mut output = std::io::stdout().lock();
    output.write_all(b"ready;\r\n")?;
    output.flush()?;
    answer(std::io::stdin().lock(), output, more, first)
}

/// Answers bytes until the input ends, and keeps all memory until then.
fn answer(input: impl BufRead, mut output: impl Write, more: usize, first: Vec<u64>) -> Result<()> {
    let mut kept = vec![first];
    for byte in input.bytes() {
        let answer = match byte? {
            b'?' => b"!",
            b'+' => {
                // The compiler must not see that nothing reads it.
                kept.push(std::hint::black_box(written(more)));
                b"="
            }
            _ => continue,
        };
        output.write_all(answer)?;
        output.flush()?;
    }
    drop(std::hint::black_box(kept));
    Ok(())
}

/// Memory of this size, in which no two pages are the same and none is zero.
fn written(mib: usize) -> Vec<u64> {
    let words = (mib << 20) / size_of::<u64>();
    // An odd factor: no two products are the same.
    (1..=words as u64)
        .map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_page_is_zero_or_like_another() {
        let memory = written(1);
        assert_eq!(memory.len(), 1 << 17);
        let mut pages: Vec<&[u64]> = memory.chunks(512).collect();
        assert!(pages.iter().all(|page| page.iter().any(|word| *word != 0)));
        pages.sort_unstable();
        pages.dedup();
        assert_eq!(pages.len(), 256);
    }

    #[test]
    fn each_known_byte_has_one_answer() {
        let mut output = Vec::new();
        answer(&b"?x?+\n?"[..], &mut output, 1, Vec::new()).expect("answered");
        assert_eq!(output, b"!!=!");
    }
}
