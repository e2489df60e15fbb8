//! Passes in one process: register a closure, submit to a pool of worker threads, receive the result.
//!
//! ```sh
//! cargo run --release --example passes_single
//! ```

use meshwork::passes::{Pass, PassRegistry, Passes};

#[actix::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // What workers can run: bytes in, bytes or an error out.
    let registry = PassRegistry::new();
    registry.register("reverse", |call| {
        if call.args.is_empty() {
            return Err("nothing to reverse");
        }
        Ok(call.args.iter().rev().copied().collect::<Vec<u8>>())
    })?;

    // Any process that opens the same directory shares the workers. On a filesystem in memory, such
    // as /dev/shm, passes never wait for a disk.
    let directory = std::env::temp_dir().join(format!("passes_single-{}", std::process::id()));
    let passes = Passes::builder(&directory).registry(registry).workers(2).start().await?;

    // One pass, awaited: the answer comes to whoever called.
    let end = passes.call(Pass::named("reverse", b"stressed".as_slice())).await?;
    println!("called: {}", String::from_utf8(end.outcome.into_result()?)?);

    // Several at once: they end in any order, and the tag tells which is which.
    let words = ["drawer", "deliver", "stop", ""];
    let client = passes.client();
    for (tag, word) in (0..).zip(words) {
        client.submit(&Pass::named("reverse", word.as_bytes()).tag(tag))?;
    }
    let mut results = words.map(|_| String::new());
    for _ in words {
        let end = client.recv().await?;
        results[end.tag as usize] = match end.outcome.into_result() {
            Ok(bytes) => String::from_utf8(bytes)?,
            Err(error) => error.to_string(),
        };
    }
    for (word, result) in words.iter().zip(results) {
        println!("submitted: {word:?} came back as {result:?}");
    }

    passes.leave().await;
    std::fs::remove_dir_all(directory)?;
    Ok(())
}
