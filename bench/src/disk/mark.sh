echo "husk-bench: begin $1;" > /dev/console
