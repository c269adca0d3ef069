// Asks a server in the ways of Go's client: a fixed body, chunks, Expect, and many at a time.
package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"
)

func main() {
	url, body := os.Args[1]+"/v1/queues.info", []byte(`{"queue_name":"orders"}`)
	client := &http.Client{Transport: &http.Transport{ExpectContinueTimeout: 10 * time.Second}}
	ask := func(body io.Reader, expect string) int {
		request, _ := http.NewRequest("POST", url, body)
		request.Header.Set("Authorization", "Bearer "+os.Args[2])
		if expect != "" {
			request.Header.Set("Expect", expect)
		}
		answer, err := client.Do(request)
		if err != nil {
			return 0
		}
		defer answer.Body.Close()
		io.Copy(io.Discard, answer.Body)
		return answer.StatusCode
	}
	fmt.Println("fixed", ask(bytes.NewReader(body), ""))
	fmt.Println("chunks", ask(struct{ io.Reader }{bytes.NewReader(body)}, ""))
	fmt.Println("expect", ask(bytes.NewReader(body), "100-continue"))
	var group sync.WaitGroup
	codes := make(chan int, 320)
	for i := 0; i < 32; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for j := 0; j < 10; j++ {
				codes <- ask(bytes.NewReader(body), "")
			}
		}()
	}
	group.Wait()
	close(codes)
	good := 0
	for code := range codes {
		if code == 200 {
			good++
		}
	}
	fmt.Println("many", good)
}
