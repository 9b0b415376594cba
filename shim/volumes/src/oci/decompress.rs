//! Decompresses layers: gzip, zstd or plain, detected by the first bytes and not by the media type.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::tarball::Skip;

/// Read buffer, in bytes.
const BUFFER: usize = 128 << 10;

/// Reads what is compressed with gzip or zstd, or neither: the first bytes say it.
///
/// # Errors
/// The first bytes cannot be read. Later reads fail if the data is damaged or ends too early.
pub fn decompress<'a>(layer: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut layer = BufReader::with_capacity(BUFFER, layer);
    let head = layer.fill_buf()?;
    Ok(match head {
        [0x1f, 0x8b, ..] => Box::new(MultiGzDecoder::new(layer)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Box::new(Zstd {
            source: layer,
            decoder: FrameDecoder::new(),
            in_frame: false,
        }),
        _ => Box::new(layer),
    })
}

/// Concatenated zstd frames (RFC 8878); skippable frames are skipped.
struct Zstd<R> {
    source: BufReader<R>,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl<R: Read> Zstd<R> {
    /// Starts the next frame; false at the end.
    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped = io::copy(&mut self.source.by_ref().take(length), &mut io::sink())?;
                    if skipped < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(false)
    }
}

impl<R: Read> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.in_frame {
                if !self.next_frame()? {
                    return Ok(0);
                }
                self.in_frame = true;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBytes(buffer.len()))
                    .map_err(io::Error::other)?;
            }
            match self.decoder.read(buffer)? {
                0 if self.decoder.is_finished() => {
                    let said = self.decoder.get_checksum_from_data();
                    if said.is_some() && said != self.decoder.get_calculated_checksum() {
                        return Err(io::Error::other("a zstd frame does not match its checksum"));
                    }
                    self.in_frame = false;
                }
                read => return Ok(read),
            }
        }
    }
}

/// Fails when more than `left` bytes are read.
pub(super) struct LimitedReader<'a, R> {
    pub(super) source: R,
    /// Shared between layers.
    pub(super) left: &'a mut u64,
}

impl<R: Read> Read for LimitedReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer)?;
        *self.left = self
            .left
            .checked_sub(read as u64)
            .ok_or_else(|| io::Error::other("it unpacks to more than 1 TiB"))?;
        Ok(read)
    }
}

impl<R: Read> Skip for LimitedReader<'_, R> {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        if bytes > *self.left {
            return Err(io::Error::other("it unpacks to more than 1 TiB"));
        }
        match io::copy(&mut self.by_ref().take(bytes), &mut io::sink())? {
            skipped if skipped == bytes => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
