//! Words for a POSIX shell.

/// `word` quoted so that a shell reads it back unchanged as one word.
pub fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// All `words`, each quoted, with a space between.
pub fn join<I: IntoIterator<Item = S>, S: AsRef<str>>(words: I) -> String {
    let quoted: Vec<String> = words.into_iter().map(|word| quote(word.as_ref())).collect();
    quoted.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_words_back() {
        let words = ["a b", "", "it's", "$HOME `x` \"q\" \\", "new\nline", "*"];
        let script = format!("for w in {}; do printf '%s\\0' \"$w\"; done", join(words));
        let output = std::process::Command::new("sh")
            .arg("-c")
            .arg(script)
            .output()
            .expect("sh");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert_eq!(text.split_terminator('\0').collect::<Vec<_>>(), words);
    }
}
