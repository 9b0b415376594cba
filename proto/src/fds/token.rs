//! Tokens, which name descriptors.

use std::fmt;

use crate::vmm::v1::Fd;

/// The name of one descriptor on the channel: 128 random bits, used once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token([u8; Token::LEN]);

impl Token {
    /// Length of a token in bytes.
    pub const LEN: usize = 16;

    /// Creates a random token.
    #[must_use]
    pub fn random() -> Token {
        Token(uuid::Uuid::new_v4().into_bytes())
    }

    /// The bytes of the token on the wire.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Token::LEN] {
        &self.0
    }
}

impl From<[u8; Token::LEN]> for Token {
    fn from(bytes: [u8; Token::LEN]) -> Token {
        Token(bytes)
    }
}

impl From<Token> for Fd {
    fn from(token: Token) -> Fd {
        Fd {
            token: token.0.to_vec(),
        }
    }
}

/// A token in a request is not [`Token::LEN`] bytes long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a descriptor token has 16 bytes, not {0}")]
pub struct BadToken(pub usize);

impl TryFrom<&Fd> for Token {
    type Error = BadToken;

    fn try_from(fd: &Fd) -> Result<Token, BadToken> {
        fd.token
            .as_slice()
            .try_into()
            .map(Token)
            .map_err(|_| BadToken(fd.token.len()))
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_the_request_and_a_short_one_is_refused() {
        let token = Token::random();
        assert_eq!(Token::try_from(&Fd::from(token)), Ok(token));
        assert_ne!(token, Token::random());
        assert_eq!(Token::try_from(&Fd { token: vec![1; 15] }), Err(BadToken(15)));
        assert_eq!(Token::from([0xab; 16]).to_string(), "ab".repeat(16));
    }
}
