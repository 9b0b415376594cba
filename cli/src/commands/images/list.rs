//! `husk images list`.

use husk_images::{ImageStore, StoredImage};
use jiff::Timestamp;

use crate::failure::Failure;
use crate::output;

/// Characters of a digest that the table shows, with `sha256:`.
const DIGEST: usize = 19;

/// List the images in the store
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "ls",
    after_help = "\
Examples:
  husk images list
  husk images list -o json | jq -r '.[].digest'"
)]
pub(super) struct Args {
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: ImagesFormat,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum ImagesFormat {
    /// Table
    #[default]
    Table,
    /// Array of objects; sizes are in bytes
    Json,
    /// One name per line
    Name,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let images = ImageStore::locate()?.list()?;
    output::print(&match args.output {
        ImagesFormat::Json => output::json(&images.iter().map(json).collect::<Vec<_>>())?,
        ImagesFormat::Name => images.iter().map(|image| format!("{}\n", image.name)).collect(),
        ImagesFormat::Table if images.is_empty() => {
            eprintln!("no image is in the store");
            return Ok(());
        }
        ImagesFormat::Table => table(&images, Timestamp::now()),
    })
}

fn json(image: &StoredImage) -> serde_json::Value {
    serde_json::json!({
        "name": image.name,
        "digest": image.digest,
        "registryDigest": image.registry_digest,
        "pulled": image.pulled.to_string(),
        "sizeBytes": image.size,
    })
}

fn table(images: &[StoredImage], now: Timestamp) -> String {
    let mut rows = vec![["IMAGE", "DIGEST", "SIZE", "PULLED"].map(String::from)];
    rows.extend(images.iter().map(|image| {
        let seconds = now.duration_since(image.pulled).as_secs();
        [
            image.name.clone(),
            image.digest.chars().take(DIGEST).collect(),
            format!("{}Mi", image.size.div_ceil(1 << 20)),
            format!("{} ago", output::age(u64::try_from(seconds).unwrap_or(0))),
        ]
    }));
    output::table(&rows)
}
